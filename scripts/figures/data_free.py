"""Recipes that need no data (benchmarks/data_free.py), and how fast the command line answers."""

from typing import Any

from figures.regions import gib, link, paragraph, region, result, seconds, table, times

FAULTS = {
    "an output that cannot be": "an output folder that cannot be created",
    "an output that exists": "an output that exists already",
    "a folder": "a missing folder",
    "a task": "an unknown task",
    "a task in it": "an unknown task in the file",
    "a task to avoid": "an unknown task in `--avoid`",
    "a GPU": "an unknown GPU",
    "a source": "a missing source",
    "a report": "a missing report",
    "a recipe": "an unknown recipe",
    "a file": "a missing file",
    "scores": "missing scores",
}
"""The faults by their names in the result file, in words for readers."""


def over_copy(run: dict[str, Any], name: str) -> float:
    """Seconds of the command, as a user sees it, over those of the fastest plain copy."""
    return run[name]["command_seconds"] / min(run["copy_seconds"])


def row(what: str, file: str, name: str) -> list[str]:
    run = result(file)
    one = run[name]
    memory = f"{gib(one['peak_host_bytes'])} host"
    if one["peak_device_bytes"]:
        memory += f", {gib(one['peak_device_bytes'])} GPU"
    return [
        what,
        seconds(one["command_seconds"]),
        seconds(min(run["copy_seconds"])),
        times(over_copy(run, name)),
        memory,
    ]


@region
def data_free() -> str:
    head = ["", "command:", "plain copy of the source:", "ratio:", "peak memory"]
    return table(
        head,
        [
            row("`fp8-dynamic`, 8B-shaped, H200", "data_free-h200", "fp8_dynamic"),
            row("three recipes from one read, the same", "data_free-h200", "three_recipes"),
            row("`fp8-dynamic`, 1.1B-shaped, two cores", "data_free-cpu", "fp8_dynamic"),
            row("three recipes from one read, the same", "data_free-cpu", "three_recipes"),
        ],
    )


@region
def data_free_parts() -> str:
    """Where the command's time goes."""
    rows = []
    for where, file in (("H200", "data_free-h200"), ("two cores", "data_free-cpu")):
        one = result(file)["fp8_dynamic"]
        start = one["command_seconds"] - one["seconds"]
        parts = [start, *(one[f"{name}_seconds"] for name in ("plan", "tensors", "flush"))]
        rows.append([f"`fp8-dynamic`, {where}", *map(seconds, parts)])
    head = ["", "start and end of the process:", "plan:", "tensors:", "hash and flush the rest:"]
    return table(head, rows)


@region
def startup() -> str:
    run = result("startup")
    asked = {
        "`quantkit --help`": ("quantkit_help", "0.3 s"),
        "`quantkit quantize --help`": ("quantkit_quantize_help", ""),
        "`quantkit gpus`": ("quantkit_gpus", ""),
        "`quantkit recommend` for one kind of GPU": ("quantkit_recommend", "1 s"),
        "the same where nothing fits: a 405B on an RTX 4090": ("quantkit_recommend_nothing", "1 s"),
        "the same for 94 layers of 128 experts on 8 GPUs": ("quantkit_recommend_mixture", "1 s"),
        "`quantkit recommend --gpu all`": ("quantkit_recommend_all", "3 s"),
        "`quantkit gate` of six checkpoints": ("quantkit_gate", "1 s"),
        "three data-free recipes of the demo": ("quantkit_quantize_three", "8 s"),
        "for comparison: Python with Typer imported": ("import_typer", ""),
        "for comparison: Python with torch imported": ("import_torch", ""),
    }
    rows = [[what, seconds(run[name]), aim] for what, (name, aim) in asked.items()]
    questions = result("startup-questions")["questions"]
    slowest, time = max(questions.items(), key=lambda one: one[1])
    words = f"the slowest of {len(questions)} questions of `recommend`: {slowest}"
    rows.insert(list(asked).index("`quantkit recommend --gpu all`"), [words, seconds(time), "1 s"])
    return table(["", "measured:", "aim:"], rows)


@region
def refusals() -> str:
    rows = []
    for command, wrong in result("startup")["refusals"].items():
        what, slowest = max(wrong.items(), key=lambda one: one[1]["cpu_seconds"])
        fault = FAULTS.get(what, what)
        rows.append([f"`{command}`", str(len(wrong)), seconds(slowest["cpu_seconds"]), fault])
    return table(["command", "faults tried:", "slowest:", "the slowest fault"], rows)


@region
def busy() -> str:
    run = result("busy")
    (one,) = run["runs"]
    return paragraph(
        f"`quantkit {run['command']}` beside another program that keeps all {run['cores']} cores "
        f"busy takes {one['ratio']:.2f} times as long as alone, {one['beside']['cpu_seconds']:.0f} "
        f"s of CPU instead of {one['alone']['cpu_seconds']:.0f} s ({link('recorded', 'busy')}; aim "
        "2.5)."
    )


@region
def report_time() -> str:
    run = result("report")
    return table(
        ["", "measured:"],
        [
            [
                f"`quantkit report` of {run['candidates']} candidates with all answers to "
                f"{run['questions']:,} questions",
                seconds(run["seconds"]["all"]),
            ]
        ],
    )
