"""Where a candidate breaks first: of everything compared, what certainly lost most.

Scores have different units, so losses are relative to the source: of right answers, or of
perplexity. They are ordered by the end of the interval that is closest to no loss: the certain
part. A score whose interval includes no loss has not been shown to break.
"""

from dataclasses import dataclass

from markupsafe import Markup

from quantkit import metrics
from quantkit.page.table import Cell, Column, table
from quantkit.report import cells
from quantkit.report.document import Comparison, Document, Entry
from quantkit.scoring import verdict
from quantkit.scoring.scorecard import Score

TITLE = "Where it breaks first"
FEWEST = 3
"""Fewest compared scores; for two, the tables above are enough."""
SIGMAS = 1.96
HEADINGS = ("Model", "Breaks first", "Then")
GENERATED = ("Tokens until they differ", "Same answers")
"""Further headings where answers were generated."""
CAPTION = (
    "The scores with the largest proven loss, as a share of the source's value: the lower end of "
    "the 95% interval decides."
)
OF_GENERATED = (
    "The last two columns compare generated answers with the source's own, with twice the standard "
    "error."
)


@dataclass(frozen=True)
class Loss:
    """One score that is shown to be worse than the source's."""

    score: str
    least: float
    """Relative to the source, at least."""
    change: str
    """The change with its interval."""

    @property
    def words(self) -> str:
        return f"{self.score} {self.change}"


def losses(report: Document, entry: Entry) -> list[Loss]:
    """Scores of a candidate that are shown to be worse, the most damaged first."""
    found = []
    for one in entry.comparisons:
        metric = metrics.of(one.score)
        if metric.rereads or one.source_at_chance or one.low is None or one.high is None:
            continue
        loss = _of_ratio(one) if one.ratio is not None else _of_share(report, one)
        if loss is not None and loss.least > 0:
            found.append(loss)
    return sorted(found, key=lambda loss: (-loss.least, loss.score))


def _of_ratio(one: Comparison) -> Loss:
    assert one.ratio is not None
    assert one.low is not None
    assert one.high is not None
    ends = verdict.percent_interval(one.low, one.high)
    return Loss(one.score, one.low - 1, f"{one.ratio - 1:+.2%} ({ends})")


def _of_share(report: Document, one: Comparison) -> Loss | None:
    before = report.baseline.scores.get(one.score)
    if before is None or not before.value or one.difference is None:
        return None
    assert one.low is not None
    assert one.high is not None
    ends = verdict.points_interval(one.low, one.high)
    return Loss(
        one.score, -one.high / before.value, f"{metrics.points(one.difference)} points ({ends})"
    )


def is_shown(report: Document) -> bool:
    """Whether there are enough scores to show this."""
    compared = {
        comparison.score
        for entry in report.candidates
        for comparison in entry.comparisons
        if not metrics.of(comparison.score).rereads
    }
    return len(compared) >= FEWEST or any(
        _first(entry, metrics.FIRST_DIFFERENCE) for entry in report.candidates
    )


def has_generated(report: Document) -> bool:
    """Whether answers were generated and compared."""
    compared = (metrics.FIRST_DIFFERENCE, metrics.SAME_ANSWERS)
    return any(_first(entry, metric) for entry in report.candidates for metric in compared)


def headings(report: Document) -> tuple[str, ...]:
    """What the columns of `rows` are."""
    return HEADINGS + GENERATED if has_generated(report) else HEADINGS


def caption(report: Document) -> str:
    """What they mean."""
    return f"{CAPTION} {OF_GENERATED}" if has_generated(report) else CAPTION


def rows(report: Document) -> list[list[str]]:
    """One row per candidate, under `headings`; empty where there are too few scores."""
    if not is_shown(report):
        return []
    found = []
    n_columns = len(headings(report))
    for entry in report.candidates:
        first = [loss.words for loss in losses(report, entry)[:2]]
        first += [""] * (2 - len(first))
        found.append(
            [
                entry.name,
                first[0] or "no loss shown",
                first[1],
                _with_error(entry, metrics.FIRST_DIFFERENCE, 1, ""),
                _with_error(entry, metrics.SAME_ANSWERS, 100, "%"),
            ][:n_columns]
        )
    return found


def parts(report: Document) -> list[str | Markup]:
    """The same for a page."""
    by_entry = rows(report)
    if not by_entry:
        return []
    columns = [Column(name, numeric=name in GENERATED) for name in headings(report)]
    shown: list[list[Cell | str | Markup]] = []
    for entry, row in zip(report.candidates, by_entry, strict=True):
        worst = losses(report, entry)
        first = Cell(row[1], worst[0].least, "bad") if worst else Cell(row[1], 0.0, "quiet")
        beside = [
            Cell(text, score.value) if (score := _first(entry, name)) else cells.unknown()
            for name, text in zip(
                (metrics.FIRST_DIFFERENCE, metrics.SAME_ANSWERS), row[3:], strict=False
            )
        ]
        shown.append([row[0], first, row[2], *beside])
    return [caption(report), table(TITLE, columns, shown, wide=True)]


def _first(entry: Entry, metric: str) -> Score | None:
    """From the first task that has such a score."""
    return next((s for key, s in entry.scores.items() if metrics.of(key).name == metric), None)


def _with_error(entry: Entry, metric: str, times: float, unit: str) -> str:
    score = _first(entry, metric)
    if score is None:
        return ""
    error = f" +- {SIGMAS * times * score.stderr:.1f}" if score.stderr is not None else ""
    return f"{times * score.value:.1f}{unit}{error}"
