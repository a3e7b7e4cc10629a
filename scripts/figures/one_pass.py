"""The calibrated pass: seconds and memory per block, whole models, perplexity in 4 bits.

Comparisons with other tools belong here too: one function per table, from peers_speed-h200.json and
quality-h200.json, and one pair of comments in docs/measured.md.
"""

from typing import Any

from figures import peers
from figures.regions import (
    gib,
    link,
    number,
    paragraph,
    percent,
    region,
    result,
    seconds,
    table,
)

SETS = {
    "gptq": ("GPTQ", "0.7 s, 8 GiB"),
    "awq": ("AWQ", "0.5 s"),
    "together": ("GPTQ, AWQ, AWQ-GPTQ, INT8 and static FP8 together", "2.5 s"),
    "gptq on host": ("GPTQ, hidden states in host memory", ""),
    "awq on host": ("AWQ, hidden states in host memory", ""),
    "together on host": ("all five, hidden states in host memory", "8 GiB"),
    "nvfp4": ("`nvfp4`", "1.0 s"),
    "mxfp4": ("`mxfp4`", ""),
    "w4afp8": ("`w4afp8`", ""),
}


def runs() -> list[dict[str, Any]]:
    """The earlier run and the latest."""
    return [result("one_pass-h200")["again"], result("one_pass-latest-h200")]


@region
def one_pass() -> str:
    """The latest run, beside the one before; hidden states in host memory only in that."""
    first, later = runs()
    rows = [
        [what, *_latest(later.get(name)), _told(first[name]), aim]
        for name, (what, aim) in SETS.items()
    ]
    return table(
        ["", "per block:", "first block:", "GPU memory:", "in an earlier run:", "aim:"], rows
    )


def _latest(run: dict[str, Any] | None) -> list[str]:
    if run is None:
        return ["", "", ""]
    first = run["seconds_by_block"][0]
    return [seconds(run["seconds_a_block"]), seconds(first), gib(run["peak_device_bytes"])]


def _told(run: dict[str, Any]) -> str:
    return f"{seconds(run['seconds_a_block'])}, {gib(run['peak_device_bytes'])}"


@region
def one_pass_size() -> str:
    """Time against the number of samples: nearly a straight line with a constant part."""
    run = result("one_pass-h200")
    points = [*run["sweep"], {**run["gptq"], "samples": 128}, {**run["awq"], "samples": 128}]
    by_recipe: dict[str, dict[int, float]] = {}
    for point in points:
        by_recipe.setdefault(point["recipes"][0], {})[point["samples"]] = point["seconds_a_block"]
    counts = sorted(by_recipe["gptq-w4a16"])
    length = run["length"]
    head = ["seconds per block", *(f"{n * length:,} tokens:" for n in counts)]
    rows = [[f"`{name}`", *(number(found[n]) for n in counts)] for name, found in by_recipe.items()]
    return table(head, rows)


def whole(recipes: list[str]) -> list[dict[str, Any]]:
    found = [run for run in result("whole_model-h200")["runs"] if run["recipes"] == recipes]
    assert found, recipes
    return found


@region
def whole_model() -> str:
    three = whole(["gptq-w4a16", "awq-w4a16", "fp8-dynamic"])[0]
    gguf = whole(["gguf-q4_k_m"])[0]
    large = whole(["gptq-w4a16", "awq-w4a16"])
    named = [
        ("8B-shaped: GPTQ, AWQ and dynamic FP8", three, "90 s"),
        ("8B-shaped: GGUF Q4_K_M with importance", gguf, ""),
        *((f"{run['blocks']} blocks of a 70B: GPTQ and AWQ", run, "80 GB of GPU") for run in large),
    ]
    rows = [
        [
            what,
            seconds(run["seconds"]),
            seconds(run["stage_seconds"]["plan"]),
            seconds(run["stage_seconds"]["tensors"]),
            gib(run["peak_device_bytes"]),
            gib(run["peak_host_bytes"]),
            aim,
        ]
        for what, run, aim in named
    ]
    head = ["", "command:", "plan:", "pass:", "GPU memory:", "host memory:", "aim:"]
    return table(head, rows)


@region
def whole_model_stages() -> str:
    """Where the seconds of the whole command go, for the shapes of a 1.5B and of an 8B."""
    rows = []
    sizes = {name: result(f"whole_model-{name.lower()}-h200")["runs"] for name in ("1.5B", "8B")}
    for size, one in [(name, run) for name, runs in sizes.items() for run in runs]:
        stages, n_recipes = one["stages"]["main"], len(one["recipes"])
        named = [stages.get(name, 0.0) for name in STAGES]
        rest = sum(stages.values()) - sum(named)
        what = f"{size}, {COUNTS[n_recipes]}, {one['caches']} caches, {one['recorded']['commit']}"
        times = [seconds(value) for value in (one["seconds"], *named, rest)]
        rows.append([what, *times, WHOLE_AIMS.get((size, n_recipes), "")])
    head = ["", "command:", *(f"{name}:" for name in STAGES), "the rest:", "aim:"]
    text = paragraph(
        f"By stages, with the commit of each run ({link('1.5B', 'whole_model-1.5b-h200')}, "
        f"{link('8B', 'whole_model-8b-h200')})."
    )
    return f"{text}\n\n{table(head, rows)}"


@region
def block_profile() -> str:
    """What each recipe adds to a block of a 1.5B."""
    name = "block_profile-1.5b-h200"
    run = result(name)
    watched = run["profile"]
    rows = [
        ["all in one pass" if recipe == "all" else f"`{recipe}`", seconds(value)]
        for recipe, value in run["seconds_per_block"].items()
    ]
    busy = watched["busy_seconds"] / watched["seconds_unwatched"]
    text = paragraph(
        f"A block of a 1.5B's shape with {run['samples']} x {run['length']:,} tokens, in a process "
        f"that has run before ({link('recorded', name)}). In the pass of all, over "
        f"{watched['blocks']} blocks and with opening the model, reading text and writing files, "
        f"the GPU is busy {percent(busy)} of the time; {watched['launches']:,} kernels are "
        "launched."
    )
    return f"{text}\n\n{table(['', 'per block:'], rows)}"


KINDS = {
    "products of the two forward passes": ("_tst_",),
    "attention, norms and gated units": ("sdpa", "_norm", "_gated"),
    "products added up in float32: Gram matrices, and GPTQ's updates": ("_tss_", "_split"),
    "coordinate descent, two sweeps": ("_descend", "_judge"),
    "GPTQ's columns": ("_update",),
    "factorisation": ("getrf", "trsm", "syrk", "sgemm"),
    "copies from the host": ("Memcpy HtoD",),
}
"""What kernels do, by parts of their names."""


@region
def block_profile_8b() -> str:
    """What a GPU spends its time on in GPTQ of an 8B's blocks."""
    name = "block_profile-8b-h200"
    run = result(name)
    watched = run["profile"]
    n_blocks, busy = watched["blocks"], watched["busy_seconds"]
    spent = dict.fromkeys(KINDS, 0.0)
    for one in watched["longest"]:
        kind = next((k for k, parts in KINDS.items() if any(p in one["name"] for p in parts)), None)
        if kind is not None:
            spent[kind] += one["seconds"]
    spent["all else"] = busy - sum(spent.values())
    rows = [
        [kind, seconds(value / n_blocks), percent(value / busy)] for kind, value in spent.items()
    ]
    each = run["seconds_per_block"]
    blocks = result("allocation-h200")["blocks"]["seconds_per_block"]["gptq"]
    text = paragraph(
        f"Where GPTQ's time goes at an 8B's shape: kernels of {n_blocks} blocks, per block "
        f"({link('recorded', name)}). A block more takes {seconds(min(each.values()))} to "
        f"{seconds(max(each.values()))} there, while files were copied to the machine, and "
        f"{seconds(blocks)} in the {link('run of the table', 'allocation-h200')} right after."
    )
    return f"{text}\n\n{table(['', 'per block:', 'of the busy time:'], rows)}"


COUNTS = {1: "`gptq-w4a16`", 5: "five recipes", 8: "eight recipes with GGUF"}
WHOLE_AIMS = {("1.5B", 1): "20 s", ("1.5B", 8): "45 s", ("8B", 5): "110 s"}
STAGES = ("imports", "calibration text", "kernel compilation", "blocks", "closing")


@region
def quality_4_bits() -> str:
    """Our own recipes; what other tools make of the same model is measured by quality.py."""
    run = result("quality-smollm2-h200")["perplexity"]
    names = {"rtn": "plain rounding", "gptq": "GPTQ", "awq": "AWQ", "awq-gptq": "AWQ-GPTQ"}
    aims = {"gptq": "28.5 and 27.5", "awq": "25.5 with zero points", "awq-gptq": "25.0 symmetric"}
    rows = [["source", f"{run['source']:.2f}", "", ""]]
    rows += [
        [what, f"{run[f'{name}-sym']:.2f}", f"{run[f'{name}-asym']:.2f}", aims.get(name, "")]
        for name, what in names.items()
    ]
    rows += [
        [f"`{name}`", f"{run[name]:.2f}", "", ""]
        for name in ("int8-w8a8", "fp8-static", "fp8-dynamic")
    ]
    return table(["perplexity", "symmetric:", "with zero points:", "aim:"], rows)


@region
def an_8b_on_one_gpu() -> str:
    """The paragraph of the README below its example."""
    free = result("data_free-h200")["fp8_dynamic"]
    # The run of the table below it, so that one figure has one value on the page.
    tokens, costs = result("peers_speed-h200")["blocks"]["tokens"], peers.block_costs()
    three = whole(["gptq-w4a16", "awq-w4a16", "fp8-dynamic"])[0]
    return paragraph(
        f"On an H200, `fp8-dynamic` of an 8B-shaped model takes "
        f"{seconds(free['command_seconds'])} from start to files on disk, "
        f"{gib(free['peak_host_bytes'])} of host and {gib(free['peak_device_bytes'])} of GPU "
        f"memory ({link('measured', 'data_free-h200', '')}). Each block of the calibrated "
        f"pass takes {seconds(costs['quantkit-gptq'][0])} for GPTQ and "
        f"{seconds(costs['quantkit-awq'][0])} for AWQ with "
        f"{tokens['samples']} x {tokens['length']:,} tokens "
        f"({link('measured', 'peers_speed-h200', '')}), and quantising the whole model with "
        f"GPTQ, AWQ and dynamic FP8 takes {seconds(three['seconds'])} "
        f"({link('measured', 'whole_model-h200', '')})."
    )


def five_together() -> str:
    """The latest run of the five recipes."""
    return seconds(runs()[1]["together"]["seconds_a_block"])
