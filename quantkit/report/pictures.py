"""The figures of a report's page."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from markupsafe import Markup

from quantkit import metrics
from quantkit.page.bars import Bar, bars
from quantkit.page.heatmap import heatmap
from quantkit.page.lines import Series, lines
from quantkit.page.scale import Axis
from quantkit.page.scatter import Point, scatter
from quantkit.page.table import Cell, Column, table
from quantkit.report import cells, layers
from quantkit.report.document import Document, Entry

SHOWN = 8
"""Candidates that fit into a figure; tables have all of them."""
SERIES = 6
MAPS = 4
WORST = 30
EACH = 3
SEARCHABLE = 8
MANY = 12
FAR = 4.0
"""Times the median change: candidates beyond it are off a chart of many."""


def against_size(report: Document) -> list[str | Markup]:
    name = report.headline
    if name is None or not report.candidates:
        return []
    perplexity = metrics.of(name).paired == metrics.LOSSES
    y = Axis(f"change of {name}", percent=True)
    if not perplexity:
        y = Axis(f"change of {name}, points", digits=1)
    times = 1 if perplexity else 100
    unit = 1 << 30 if report.baseline.size_bytes >= 1 << 30 else 1 << 20
    points = []
    for entry in report.candidates:
        cell = cells.change(report, entry, name)
        if cell.value is None:
            continue
        found = entry.comparison(name)
        interval = None
        if found and found.low is not None and found.high is not None:
            less = 1 if perplexity else 0
            interval = (times * (found.low - less), times * (found.high - less))
        points.append(
            Point(
                entry.name,
                entry.size_bytes / unit,
                times * cell.value,
                interval,
                entry.format,
                entry.pareto,
            )
        )
    points, note = _in_sight(points, y)
    return [
        scatter(
            "Size and what it costs",
            points,
            Axis("size, GiB" if unit == 1 << 30 else "size, MiB", digits=2),
            y,
            front="no other is both smaller and better",
            note="Bars are 95% intervals of the change against the source. "
            + ("Lower is better." if perplexity else "Higher is better.")
            + note,
        )
    ]


def _in_sight(points: list[Point], axis: Axis) -> tuple[list[Point], str]:
    """Among many candidates, a few broken ones would push all others onto one line: they are not
    drawn, and the note names them.
    """
    typical = statistics.median([abs(point.y) for point in points] or [0.0])
    far = [p for p in points if abs(p.y) > FAR * typical and not p.front]
    if len(points) < MANY or not far or len(far) > len(points) / 4:
        return points, ""
    drawn = [replace(point, is_drawn=point not in far) for point in points]
    named = ", ".join(f"{p.name} ({axis.show(p.y)})" for p in far)
    return drawn, f" Off the chart: {named}."


def groups(report: Document) -> list[str | Markup]:
    """Changes of accuracy where tasks come in groups."""
    asked = report.baseline.settings.tasks
    names = [g for g in report.groups if g not in asked]
    values: list[list[float | None]] = []
    rows: list[list[Cell | str | Markup]] = []
    for entry in report.candidates:
        found = [entry.comparison(f"{group}/acc") for group in names]
        values.append([cells.points_of(c) for c in found])
        rows.append([entry.name, *(cells.group_cell(c) for c in found)])
    kept = [i for i in range(len(names)) if any(line[i] is not None for line in values)]
    if not kept:
        return []
    shown = values[:SHOWN]
    return [
        heatmap(
            "Points lost",
            [entry.name for entry in report.candidates[:SHOWN]],
            [names[i] for i in kept],
            [[_lost(line[i]) for i in kept] for line in shown],
            Axis("points lost against the source; below 0: gained", digits=1),
        ),
        table(
            "Points against the source, with 95% intervals",
            [Column("Model"), *(Column(names[i], numeric=True) for i in kept)],
            [[row[0], *(row[i + 1] for i in kept)] for row in rows],
            searchable=len(rows) > SEARCHABLE,
            wide=len(kept) > 4,
        ),
    ]


def _lost(change: float | None) -> float | None:
    """A loss as a positive number, since dark means more."""
    return None if change is None else -change


def divergence(report: Document) -> list[str | Markup]:
    task = (report.headline or "").partition("/")[0]
    series = []
    for entry in _pictured(report, SERIES, report.candidates):
        points = [
            (1 - share, entry.scores[f"{task}/{name}"].value)
            for name, share in metrics.quantiles().items()
            if f"{task}/{name}" in entry.scores
        ]
        if len(points) > 1:
            series.append(Series(entry.name, sorted(points)))
    if not series:
        return []
    note = "To the left are the worst tokens."
    if len(series) < len(report.candidates):
        note += (
            f" {len(series)} of {len(report.candidates)} candidates are drawn: the recommended "
            "one, those that none beats in both size and quality, then the best."
        )
    return [
        "The KL divergence of each token's prediction from the source's, in nats: "
        "an average hides the few tokens where a model diverges.",
        lines(
            "Divergence of the worst tokens",
            series,
            Axis("share of tokens with a larger divergence", log=True, percent=True),
            Axis("KL, nats", log=True),
            note=note,
        ),
    ]


def _pictured(report: Document, most: int, among: Sequence[Entry]) -> list[Entry]:
    """Candidates shown in figures: the recommended one, the front, then the best."""
    chosen = report.recommended.name if report.recommended else None
    ranked = sorted(among, key=lambda e: (e.name != chosen, not e.pareto))[:most]
    return [entry for entry in among if entry in ranked]


def _error(worst: layers.Worst) -> str:
    """In the form that the terminal and model cards have."""
    return f"{worst.error:.2e}" if worst.what == "output" else f"{worst.error:.1%}"


def layer_maps(report: Document) -> list[str | Markup]:
    """The worst layers overall, and a map of the errors of some candidates."""
    known = [entry for entry in report.candidates if entry.made and entry.made.layers]
    if not known:
        return []
    worst = [
        found
        for entry in known[: WORST // EACH]
        if entry.made
        for found in layers.ranked(entry.name, entry.made.layers)[:EACH]
    ]
    parts: list[str | Markup] = [
        "The squared error of a layer's output on calibration data, over that output's square; "
        "for recipes without data the error of the weights, in percent of their norm. The two are "
        "not comparable.",
        table(
            f"The worst {EACH} layers of each",
            [Column("Layer"), Column("Model"), Column("Error", numeric=True), Column("Error in")],
            [[w.layer, w.candidate, Cell(_error(w), w.error), w.what] for w in worst],
        ),
    ]
    # Weight errors alone look the same everywhere.
    with_outputs = [
        entry for entry in known if entry.made and layers.grid(entry.made.layers).is_output
    ]
    for entry in _pictured(report, MAPS, with_outputs or known):
        if entry.made is None:
            continue
        found = layers.grid(entry.made.layers)
        what = "output error" if found.is_output else "weight error"
        axis = Axis(f"{what}, relative", log=True)
        parts.append(
            heatmap(entry.name, found.kinds, found.blocks, found.values, axis, note=found.outside)
        )
        if entry.made.formats:
            columns = [Column("Layers"), Column("Blocks"), Column("Format")]
            rows: list[list[str]] = entry.made.formats
            parts.append(table(f"Formats of {entry.name}", columns, rows, dense=True))
    return parts


def cost(report: Document) -> list[str | Markup]:
    made = [
        (entry.name, entry.made.seconds, entry.made.peak_device_bytes or entry.made.peak_host_bytes)
        for entry in report.candidates
        if entry.made
    ]
    costs = [(name, seconds, peak) for name, seconds, peak in made if seconds and peak]
    if not costs:
        return []
    return [
        bars(
            "Time to quantise",
            [Bar(name, seconds) for name, seconds, _ in costs[: 3 * SHOWN]],
            Axis("seconds", digits=1),
            note="Recipes made in one run share its time.",
        ),
        bars(
            "Peak memory",
            [Bar(name, peak / (1 << 30)) for name, _, peak in costs[: 3 * SHOWN]],
            Axis("GiB", digits=2),
            note="On the GPU, or on the host where there was none.",
        ),
    ]
