"""The rows of the comparison as text, shared by terminal and Markdown."""

from quantkit.report.comparison import Report
from quantkit.score.scorecard import Scorecard
from quantkit.storage import gib

TITLES = ("model", "size", "of source", "bits/weight")
NARROW_TITLES = ("model", "size", "of\nsource", "bits/\nweight")


def titles(report: Report, narrow: bool = False) -> list[str]:
    """Column headings; narrow ones take some lines, so that all columns fit into 80 characters."""
    scores = [report.headline, "change", *([report.accuracy] if report.accuracy else [])]
    return [*NARROW_TITLES, *map(_narrow, scores)] if narrow else [*TITLES, *scores]


def rows(report: Report) -> list[list[str]]:
    """The source first, then candidates from best to worst."""
    return [_row(report, card) for card in (report.baseline, *report.candidates)]


def _narrow(title: str) -> str:
    task, _, metric = title.partition("/")
    return "\n".join(["_\n".join(task.rsplit("_", 1)), metric]) if metric else title


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
        *([f"{card.scores[report.accuracy].value:.1%}"] if report.accuracy else []),
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
