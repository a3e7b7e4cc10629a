"""Formats chosen layer by layer (benchmarks/allocation.py)."""

from collections.abc import Iterator
from typing import Any

from figures import best_bits
from figures.regions import (
    RESULTS,
    link,
    number,
    paragraph,
    percent,
    region,
    result,
    seconds,
    table,
    times,
)
from quantkit.hardware.gpus import label


def runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every machine's result."""
    for path in sorted(RESULTS.glob("allocation-*.json")):
        yield path.stem.removeprefix("allocation-").upper(), result(path.stem)


def models() -> Iterator[tuple[str, dict[str, Any]]]:
    for where, run in runs():
        for name, entry in run["models"].items():
            yield f"{name}, {where}", entry


@region
def mixed_predictions() -> str:
    rows = [
        [
            name,
            f"{bits} bits",
            str(found["n"]),
            *(f"{found['spearman'][key]:.2f}" for key in KINDS),
        ]
        for name, entry in models()
        for bits, found in entry["mixtures"].items()
    ]
    head = ["", "random mixes at", "n:", "predicted KL:", "squared error:", "relative error:"]
    return table(head, rows)


KINDS = ("weighted", "output_error", "relative_error")


@region
def mixed_choices() -> str:
    rows = [
        [
            f"{name}, {bits} bits",
            number(found["kl"]),
            f"{number(found['best_uniform_kl'])} ({found['best_uniform']})",
            number(found["best_random_kl"]),
            number(found["median_random_kl"]),
            percent(found["less_than_four_bits"]),
        ]
        for name, entry in models()
        for bits, found in entry["choices"].items()
    ]
    head = ["KL", "chosen:", "best uniform:", "best of 20 random:", "their median:"]
    return table([*head, "reduction against W4A16 in groups of 32:"], rows)


@region
def mixed_search() -> str:
    rows = [
        [
            f"{name}, {bits} bits",
            str(found["n_measured"]),
            f"{number(found['before'])} to {number(found['after'])}",
            f"{number(entry['choices'][bits]['kl'])} to {number(found['kl'])}",
        ]
        for name, entry in models()
        for bits, found in entry.get("searched", {}).items()
    ]
    head = ["KL", "changes measured:", "on the windows of the search:", "on those of the tables:"]
    return table(head, rows)


@region
def mixed_solver() -> str:
    found = [(where, run["solver"]) for where, run in runs() if "solver" in run]
    rows = []
    for where, solver in found:
        slowest = max(one["seconds"] for one in solver["budgets"].values())
        gap = max(one["gap"] for one in solver["budgets"].values())
        what = f"{solver['n_units']:,} units, {solver['n_formats']} formats, {where}"
        rows.append([what, seconds(slowest), f"{gap:.4%}"])
    return table(["", "slowest of three budgets:", "proven gap:"], rows)


@region
def mixed_gguf() -> str:
    name = "gguf_best-h200"
    run = result(name)
    rows = [
        [
            f"`{kind.upper()}`",
            *(f"{pair[who]['tensor_bytes']:,}" for who in ("llama.cpp", "mixed")),
            *(number(pair[who]["kl_mean"]) for who in ("llama.cpp", "mixed")),
            percent(1 - pair["mixed"]["kl_mean"] / pair["llama.cpp"]["kl_mean"]),
        ]
        for kind, pair in run["types"].items()
    ]
    told = (
        f"{best_bits.FOLDERS[run['model']]}, {run['windows']} windows of "
        f"{run['length']:,} tokens of held-out text ({link('recorded', name)}, "
        f"{label(run['device'])})."
    )
    head = ["", "bytes, llama.cpp's:", "mixed:", "KL, llama.cpp's:", "mixed:", "less:"]
    return f"{paragraph(told)}\n\n{table(head, rows)}"


@region
def mixed_peer() -> str:
    found = [
        (name, bits, one)
        for name, entry in models()
        for bits, one in entry.get("peer", {}).items()
        if "kl" in one
    ]
    rows = [
        [
            f"{name}, {one['bits']:.2f} bits",
            number(one["our_kl"]),
            number(one["kl"]),
            seconds(one["our_seconds"]),
            seconds(one["seconds"]),
            f"{one['our_share_of_time']:.2f}",
        ]
        for name, _, one in found
    ]
    head = ["", "KL, ours:", "AutoScheme's:", "choosing, ours:", "AutoScheme's:", "share of time:"]
    return table(head, rows)


@region
def mixed_table_time() -> str:
    where, run = next((where, run) for where, run in runs() if "blocks" in run)
    blocks = run["blocks"]
    each = blocks["seconds_per_block"]
    return paragraph(
        f"Blocks of an 8B Llama's shape with {blocks['n_tokens']:,} tokens, {where}: a block of "
        f"the pass that makes the table of {len(blocks['formats'])} formats takes "
        f"{seconds(each['table'])}, of the pass that makes one GPTQ checkpoint "
        f"{seconds(each['gptq'])}: {times(blocks['table_over_pass'])} as long (aim 1.6)."
    )


@region
def mixed_in_vllm() -> str:
    name = "vllm-mixed-h200"
    run = result(name)
    ((mixed, found),) = ((n, one) for n, one in run["models"].items() if n != "source")
    return paragraph(
        f"`{mixed}` of SmolLM2-135M in vLLM {found['version']} on one {label(found['device'])} "
        f"({link('recorded', name)}): it agrees with quantkit's reference, "
        f"{times(found['over_noise'])} the distance that two runs of 16-bit arithmetic have from "
        "each other, and the test distinguishes it from the source."
    )
