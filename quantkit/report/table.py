"""The rows of the comparison as text, shared by terminal and Markdown."""

from quantkit.report.comparison import Report
from quantkit.score.scorecard import Scorecard
from quantkit.storage import gib

TITLES = ("model", "size", "of source", "bits/weight")


def titles(report: Report, narrow: bool = False) -> list[str]:
    """Column headings; narrow ones break task and metric into two lines."""
    headline = report.headline.replace("/", "\n") if narrow else report.headline
    return [*TITLES, headline, "change"]


def rows(report: Report) -> list[list[str]]:
    """The source first, then candidates from best to worst."""
    return [_row(report, card) for card in (report.baseline, *report.candidates)]


def _row(report: Report, card: Scorecard) -> list[str]:
    score = card.scores[report.headline]
    is_source = card is report.baseline
    return [
        f"{card.name} (source)" if is_source else card.name,
        gib(card.size_bytes),
        f"{card.size_bytes / report.baseline.size_bytes:.1%}",
        f"{card.bits_per_weight:.2f}",
        f"{score.value:.3f}",
        "" if is_source else f"{report.change(card, report.headline):+.2%}",
    ]


def verdicts(report: Report) -> dict[str, list[tuple[str, str]]]:
    """What was found of the tasks that were asked for, by score: candidates and sentences."""
    found: dict[str, list[tuple[str, str]]] = {}
    for card in report.candidates:
        for finding in report.findings.get(card.name, ()):
            task, _, metric = finding.score.rpartition("/")
            if task in report.baseline.settings.tasks and metric != "acc_norm":
                found.setdefault(finding.score, []).append((card.name, finding.words))
    return found
