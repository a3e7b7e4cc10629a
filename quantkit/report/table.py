"""The rows of the comparison as text, shared by terminal and Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit import metrics
from quantkit.report import evidence
from quantkit.scoring import verdict
from quantkit.scoring.paired import ALPHA, AccuracyChange
from quantkit.storage import gib

if TYPE_CHECKING:
    from quantkit.report.comparison import Report
    from quantkit.scoring.scorecard import Scorecard

TITLES = ("model", "size", "of source", "bits/weight")
STAR = "* No other is both smaller and better."
GUESSED = "The source itself does no better than guessing, so changes say little about quality."
NARROW_TITLES = ("model", "size", "of\nsource", "bits/\nweight")


def titles(report: Report, narrow: bool = False) -> list[str]:
    """Column headings; narrow ones wrap, so that all columns fit into 80 characters."""
    scores = [report.headline, "change", *([report.accuracy] if report.accuracy else [])]
    if narrow:
        return [*NARROW_TITLES, *map(_narrow, scores)]
    distances = (metrics.of(name).label for name in _divergence(report))
    return [*TITLES, *scores, *_more(report), *distances]


def rows(report: Report, narrow: bool = False) -> list[list[str]]:
    """The source first, then candidates from best to worst."""
    cards = (report.baseline, *report.candidates)
    if narrow:
        return [_row(report, card) for card in cards]
    more = _more(report)
    return [
        [*_row(report, card), *_values(card, more), *_from_source(report, card)] for card in cards
    ]


def _more(report: Report) -> list[str]:
    """Scores that decide as well, after the headline and the accuracy."""
    first = [name for name in (report.headline, report.accuracy) if name]
    source = report.baseline
    found = evidence.columns(first, source.settings.tasks, source.groups, source.scores)
    return found[len(first) :]


def _values(card: Scorecard, names: list[str]) -> list[str]:
    scores = {name: card.scores.get(name) for name in names}
    return ["" if score is None else metrics.shown(n, score.value) for n, score in scores.items()]


def _divergence(report: Report) -> list[str]:
    """Every candidate's known distance from the source."""
    task = report.headline.partition("/")[0]
    return [
        name
        for name in metrics.distances()
        if report.candidates and all(f"{task}/{name}" in c.scores for c in report.candidates)
    ]


def _from_source(report: Report, card: Scorecard) -> list[str]:
    task = report.headline.partition("/")[0]
    values = {name: card.scores.get(f"{task}/{name}") for name in _divergence(report)}
    return [
        "" if card is report.baseline or score is None else metrics.shown(name, score.value)
        for name, score in values.items()
    ]


def _narrow(title: str) -> str:
    task, _, metric = title.partition("/")
    return "\n".join(["_\n".join(task.rsplit("_", 1)), metric]) if metric else title


def _mark(report: Report, card: Scorecard) -> str:
    """A star for candidates that none beats in both size and quality."""
    return " *" if len(report.candidates) > 1 and card.name in report.front else ""


def advice(report: Report) -> list[str]:
    """Which one to take, and what the star means."""
    found = report.recommendation
    heading = "No recommendation:" if found.name is None else f"Recommended: {found.name},"
    lines = [f"{heading} {found.reason}."]
    if len(report.candidates) > 1:
        lines.append(STAR)
    return lines


def proven(report: Report) -> list[str]:
    """How serving engines handled candidates, grouped by result."""
    found: dict[str, list[str]] = {}
    for card in report.candidates:
        if card.verified is not None:
            found.setdefault(card.verified.short, []).append(card.name)
    return [f"Checked in {what} ({', '.join(names)})." for what, names in found.items()]


def _row(report: Report, card: Scorecard) -> list[str]:
    score = card.scores[report.headline]
    is_source = card is report.baseline
    return [
        f"{card.name} (source)" if is_source else f"{card.name}{_mark(report, card)}",
        gib(card.size_bytes),
        f"{card.size_bytes / report.baseline.size_bytes:.1%}",
        f"{card.bits_per_weight:.2f}",
        metrics.shown(report.headline, score.value),
        "" if is_source else _change(report, card),
        *(
            [metrics.shown(report.accuracy, card.scores[report.accuracy].value)]
            if report.accuracy
            else []
        ),
    ]


def _change(report: Report, card: Scorecard) -> str:
    """Perplexity in percent, accuracy in points, as for limits."""
    score, before = card.scores[report.headline], report.baseline.scores[report.headline]
    if score.higher_is_better:
        return f"{metrics.points(score.value - before.value)} points"
    return f"{report.change(card, report.headline):+.2%}"


def verdicts(report: Report) -> dict[str, list[tuple[str, str]]]:
    """Findings for the requested tasks, by score: candidates and sentences."""
    found: dict[str, list[tuple[str, str]]] = {}
    for card in report.candidates:
        for finding in report.findings.get(card.name, ()):
            if finding.score.rpartition("/")[0] in report.baseline.settings.tasks:
                found.setdefault(finding.score, []).append((card.name, finding.words))
    return found


def groups(report: Report) -> tuple[list[str], list[list[str]]] | None:
    """Changes of accuracy per group of tasks, where requested tasks contain groups."""
    names: dict[str, None] = {}
    found = []
    for card in report.candidates:
        cells = {}
        for finding in report.findings.get(card.name, ()):
            task, _, metric = finding.score.rpartition("/")
            change = finding.change
            inside = task in report.baseline.groups and task not in report.baseline.settings.tasks
            if inside and metric == metrics.ACCURACY and isinstance(change, AccuracyChange):
                ends = verdict.points_interval(change.low, change.high)
                mark = " !" if finding.adjusted_p < ALPHA else ""
                cells[task] = f"{metrics.points(change.difference)} ({ends}){mark}"
                names[task] = None
        found.append((card.name, cells))
    if not names:
        return None
    rows = [[name, *(cells.get(task, "") for task in names)] for name, cells in found]
    return ["model", *names], rows
