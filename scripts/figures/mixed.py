"""Formats chosen layer by layer (benchmarks/allocation.py)."""

from collections.abc import Iterator
from typing import Any

from figures.regions import RESULTS, number, percent, region, result, seconds, table


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
    return table([*head, "less than W4A16 in groups of 32:"], rows)


@region
def mixed_solver() -> str:
    found = [(where, run["solver"]) for where, run in runs() if "solver" in run]
    rows = []
    for where, solver in found:
        slowest = max(one["seconds"] for one in solver["budgets"].values())
        gap = max(one["gap"] for one in solver["budgets"].values())
        what = f"{solver['n_units']:,} units, {solver['n_formats']} formats, {where}"
        rows.append([what, seconds(slowest), f"{gap:.4%}"])
    return table(["", "slowest of three budgets:", "gap that is proven:"], rows)
