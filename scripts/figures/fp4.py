"""FP4 beside llm-compressor's, and 4-bit inputs beside their floor (benchmarks/fp4.py)."""

import re
from typing import Any

from figures.regions import link, number, paragraph, region, result, table
from quantkit.hardware.gpus import label

PEERS = {"nvfp4-a16": "llmcompressor-NVFP4A16", "mxfp4-a16": "llmcompressor-MXFP4A16"}
BITS = {3: "groups of 128", 2: "groups of 64"}
TOOLS = {
    "quantkit-gptq": "`gptq-w{bits}a16`",
    "llmcompressor-gptq": "llm-compressor GPTQ",
    "autoround-0": "AutoRound, `iters=0`",
}


@region
def fp4() -> str:
    """Every row; what has a peer says what share of its divergence it has."""
    return _told("fp4-demo-h200")


@region
def fp4_real() -> str:
    """The same on a real model, and what 4-bit inputs leave above their floor."""
    places = ("fp4-qwen-h200", "fp4-qwen-mxfp4-h200", "fp4-demo-mxfp4-cpu")
    rows, mx, small = (result(name)["rows"] for name in places)
    wider = rows["w4afp8"]["perplexity"] / rows["gptq-w4a16"]["perplexity"] - 1
    more = paragraph(
        f"Above its floor `nvfp4` has {_above_floor(rows, 'nvfp4'):.0%} of the KL that "
        f"llm-compressor's NVFP4 has, and `mxfp4` {_above_floor(mx, 'mxfp4'):.0%} of its MXFP4's "
        f"({link('recorded', places[1])}), {_above_floor(small, 'mxfp4'):.0%} on the demo model "
        f"({link('recorded', places[2])}). The perplexity of `w4afp8` is {wider:.1%} above that of "
        "`gptq-w4a16`."
    )
    return f"{_told('fp4-qwen-h200')}\n\n{more}"


def _above_floor(rows: dict[str, Any], name: str) -> float:
    floor = rows[f"floor of {name}"]["kl_mean"]
    ours, theirs = rows[name]["kl_mean"], rows[f"llmcompressor-{name.upper()}"]["kl_mean"]
    return float((ours - floor) / (theirs - floor))


@region
def low_bits() -> str:
    """Two and three bits beside other tools' roundings that do not train, each width in one run."""
    places = ("low-bits-qwen-h200", "low-bits-2-qwen-h200")
    runs = [result(name) for name in places]
    ((name, model),) = runs[0]["models"].items()
    source, rows = model["source"]["perplexity"], {}
    for run in runs:
        for one in run["models"][name]["rows"]:
            tool = TOOLS[re.sub(r"-w\d$", "", one["run"])].format(bits=one["bits"])
            change = f"{100 * (one['perplexity'] / source - 1):+.1f}%"
            bits = f"{one['bits']} bits, {BITS[one['bits']]}"
            rows[one["run"]] = [bits, tool, change, number(one["kl_mean"])]
    text = (
        f"{name} ({model['origin']}), {model['tokens']['samples']} x {model['tokens']['length']:,} "
        f"tokens of calibration, {model['windows']} windows of {model['length']:,} tokens of "
        f"WikiText-2 (3 bits {link('recorded', places[0])}, 2 bits {link('recorded', places[1])}, "
        f"{label(runs[0]['device'])})."
    )
    return f"{paragraph(text)}\n\n{table(['', 'by', 'perplexity:', 'KL:'], list(rows.values()))}"


@region
def fp4_since() -> str:
    """The recipes as they are since, on a CPU and without the peer."""
    return _told("fp4-demo-cpu")


def _told(name: str) -> str:
    run = result(name)
    rows = []
    source = run["source"]["perplexity"]
    for recipe, one in run["rows"].items():
        peer = run["rows"].get(PEERS.get(recipe, ""))
        share = f"{one['kl_mean'] / peer['kl_mean']:.0%}" if peer else ""
        change = f"{100 * (one['perplexity'] / source - 1):+.2f}%"
        rows.append([recipe, change, number(one["kl_mean"]), share])
    told = (
        f"{run['model']}, calibrated on {run['calibration']}, compared with the source on "
        f"{run['windows']} windows of {run['length']} tokens of held-out text "
        f"({link('recorded', name)}, {label(run['device'])})."
    )
    if "note" in run:
        told += f" Since then: {run['note']}."
    head = ["", "perplexity:", "KL:", "of llm-compressor's KL:"]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return f"{paragraph(told)}\n\n{table(head, rows)}"
