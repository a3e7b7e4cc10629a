"""Cells of a report's tables."""

from typing import Literal

from markupsafe import Markup

from quantkit import metrics
from quantkit.page.table import Cell
from quantkit.report.document import Comparison, Document, Entry
from quantkit.scoring import verdict
from quantkit.scoring.paired import ALPHA


def change(report: Document, entry: Entry, name: str) -> Cell:
    """The change from the source, with the interval where answers are paired."""
    before, after = report.baseline.scores.get(name), entry.scores.get(name)
    if before is None or after is None:
        return unknown()
    found = entry.comparison(name)
    if metrics.of(name).paired == metrics.LOSSES and before.value:
        shift = found.ratio - 1 if found and found.ratio else after.value / before.value - 1
        amount = f"{shift:+.2%}"
        between = ""
        if found and found.low is not None and found.high is not None:
            between = verdict.percent_interval(found.low, found.high)
        worse = shift > 0
    else:
        shift = found.difference if found and found.difference is not None else 0.0
        shift = shift if found else after.value - before.value
        amount, between = metrics.points(shift), ""
        if found and found.low is not None and found.high is not None:
            between = verdict.points_interval(found.low, found.high)
        worse = shift < 0
    real = found is not None and found.adjusted_p < ALPHA and not found.source_at_chance
    text = Markup("{}<small>{}</small>").format(amount, between) if between else amount
    return Cell(text, shift, tone(worse, real))


def tone(is_worse: bool, is_real: bool) -> Literal["", "good", "bad"]:
    """Colour only for significant differences."""
    if not is_real:
        return ""
    return "bad" if is_worse else "good"


def group_cell(found: Comparison | None) -> Cell:
    if found is None or found.difference is None or found.low is None or found.high is None:
        return unknown()
    real = found.adjusted_p < ALPHA and not found.source_at_chance
    colour = tone(found.difference < 0, real)
    ends = verdict.points_interval(found.low, found.high)
    text = Markup("{}<small>{}</small>").format(metrics.points(found.difference), ends)
    return Cell(text, found.difference, colour)


def points_of(found: Comparison | None) -> float | None:
    return 100 * found.difference if found and found.difference is not None else None


def unknown() -> Cell:
    return Cell("", None, "quiet")


def badge(report: Document, entry: Entry) -> Cell:
    """Why a candidate is worth a look, in its own column."""
    if report.recommended and entry.name == report.recommended.name:
        return Cell("recommended", 2, "good")
    return Cell("best of its size", 1) if entry.pareto else Cell("", 0)


def model(report: Document, entry: Entry) -> Cell:
    """A model's name, and why it is worth a look."""
    if entry is report.baseline:
        return Cell(f"{entry.name} (source)")
    why = badge(report, entry)
    if not why.text:
        return Cell(entry.name)
    return Cell(Markup('{}<small class="{}">{}</small>').format(entry.name, why.tone, why.text))
