"""Terminal output of a sweep: its plan, its status, and its results."""

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from quantkit.sweep.cost import Cost
    from quantkit.sweep.driver import Estimated
    from quantkit.sweep.overview import ModelReport, Overview
    from quantkit.sweep.status import Status

MOST_STEPS = 60
"""Larger graphs are summarised by kind."""


def show_plan(found: "Estimated", as_json: bool) -> None:
    """The graph, with hours and bytes."""
    from quantkit.cli import console
    from quantkit.storage import duration, gib

    if as_json:
        console.print_json(found.to_json())
        return
    steps = found.graph.steps
    costs = found.costs.steps
    if len(steps) <= MOST_STEPS:
        console.print_table(
            ["step", "about", "", "time", "size"],
            [
                [
                    step.kind,
                    step.title,
                    "done" if name in found.done else "",
                    "" if name in found.done else _time(costs[name]),
                    "" if name in found.done else _size(costs[name].size_bytes),
                ]
                for name, step in steps.items()
            ],
            words=(0, 1, 2),
        )
    else:
        kinds = dict.fromkeys(step.kind for step in steps.values())
        console.print_table(
            ["step", "steps", "done"],
            [
                [
                    kind,
                    f"{len(of_kind):,}",
                    f"{sum(step.name in found.done for step in of_kind):,}",
                ]
                for kind in kinds
                if (of_kind := found.graph.of_kind(kind))
            ],
        )
    usual = "" if found.has_named_tasks else " (the default; `tasks:` in the file names others)"
    console.say(f"scored on {', '.join(found.tasks)}{usual}")
    left = [costs[name] for name in steps if name not in found.done]
    seconds = {
        on_gpu: sum(c.seconds or 0 for c in left if c.on_gpu == on_gpu) for on_gpu in (True, False)
    }
    at_least = "at least" if any(c.seconds is None for c in left) else "about"
    gpu, cpu = seconds[True], seconds[False]
    amounts = [f"{_gpu_time(gpu)} on {found.costs.gpu}"] if gpu else []
    amounts += [f"{duration(cpu)} on a CPU like this one"] if cpu else []
    size = gib(sum(c.size_bytes or 0 for c in left))
    done = f", {len(found.done):,} of them done" if found.done else ""
    console.say(f"{len(steps):,} steps{done}; to do: {at_least} {' and '.join([*amounts, size])}")
    if at_least == "at least":
        typer.echo("? marks estimates that need data which is not available here")


def _time(cost: "Cost") -> str:
    if cost.seconds is None:
        return "?"
    if not cost.seconds:
        return ""
    from quantkit.storage import duration

    return duration(cost.seconds)


def _gpu_time(seconds: float) -> str:
    """In the unit that GPUs are paid by, unless that would be a small fraction."""
    from quantkit.storage import duration

    return f"{seconds / 3600:,.3g} GPU hours" if seconds >= 3600 else duration(seconds)


def _size(size_bytes: int | None) -> str:
    from quantkit.storage import gib

    if size_bytes is None:
        return "?"
    if not size_bytes:
        return ""
    return gib(size_bytes) if size_bytes >= 100 << 10 else "< 0.1 MiB"


def show_status(found: "Status") -> None:
    """Counts by kind, then running steps, then failures."""
    from quantkit.cli import console
    from quantkit.storage import duration

    console.print_table(
        ["step", "done", "running", "waiting", "given up", "time spent"],
        [
            [
                line.kind,
                f"{line.done:,} of {line.n_steps:,}",
                str(line.running or ""),
                str(line.waiting or ""),
                str(line.given_up or ""),
                duration(line.seconds),
            ]
            for line in found.lines
        ],
    )
    if found.running:
        lines = [(name, f"for {duration(since)}") for name, since in found.running.items()]
        console.print_lines("running:", lines)
    if found.given_up:
        failures = [
            (name, f"{why}; {found.logs[name]}" if name in found.logs else why)
            for name, why in found.given_up.items()
        ]
        console.print_lines("given up:", failures)
    if found.faults:
        console.print_lines(
            "changed since it was written:", [("-", fault) for fault in found.faults]
        )
    if found.driver:
        typer.echo(f"driven by {found.driver}")
    elif found.is_done:
        typer.echo("everything is done")
    else:
        typer.echo("not running; `quantkit sweep run` resumes it")


def show_overview(found: "Overview", out: str, as_json: bool) -> None:
    """Every candidate of every model, and where the pages are."""
    from quantkit.cli import console
    from quantkit.report.table import STAR

    if as_json:
        console.print_json(found.to_json())
        return
    for model in found.models:
        console.print_table(_titles(model), _rows(model), words=(0,))
        if any(entry.pareto for entry in model.document.candidates):
            console.say(STAR)
        chosen = model.document.recommended
        if chosen is not None:
            console.say(
                f"{model.label}: {chosen.name} is {chosen.reason}"
                if chosen.name
                else f"{model.label}: {chosen.reason}"
            )
        if model.gate is not None:
            open_ones = sum(c["answer"] == "cannot tell" for c in model.gate["checks"])
            but = f"; {open_ones} of {len(model.gate['checks'])} checks are undecided"
            outcome = model.gate["outcome"]
            console.say(f"gate of {model.label}: {outcome}{but if open_ones else ''}")
        typer.echo("")
    typer.echo(f"one report over everything: {out.rstrip('/')}/report.html")


def _titles(model: "ModelReport") -> list[str]:
    report = model.document
    names = [name for name in (report.headline, report.accuracy) if name]
    scores = [name.replace("_", "_\n", 1).replace("/", "/\n") for name in names]
    gate = ["gate"] if model.gate is not None else []
    return [model.label, "size", *scores[:1], "change", *scores[1:], *gate]


def _rows(model: "ModelReport") -> list[list[str]]:
    from quantkit import metrics
    from quantkit.storage import gib

    report = model.document
    rows = []
    for entry in (report.baseline, *report.candidates):
        source = entry is report.baseline
        title = "source" if source else entry.name + (" *" if entry.pareto else "")
        row = [title, gib(entry.size_bytes)]
        for place, name in enumerate((report.headline, report.accuracy)):
            if not name:
                continue
            score, before = entry.scores.get(name), report.baseline.scores[name]
            row.append("" if score is None else metrics.shown(name, score.value))
            if place == 0:
                changed = "" if score is None else metrics.change(name, before.value, score.value)
                row.append("" if source else changed)
        if model.gate is not None:
            row.append("" if source else model.answer(entry.name))
        rows.append(row)
    return rows
