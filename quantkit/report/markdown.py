"""The report as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit import metrics
from quantkit.report import damage, speed, table

if TYPE_CHECKING:
    from quantkit.report.comparison import Report

MOST_LINES = 60
"""The size limit of a comment on a pull request."""
FEWEST_DETAILED = 3
"""Candidates that sections have before the table has fewer."""
MOST_SPEEDS = 10


def render(whole: Report) -> str:
    """A table with a heading, sections on each candidate, and how it was measured.

    If there are many candidates, sections have only the best, and then the table too.
    """
    n_all = min(len(whole.candidates), MOST_LINES)
    sizes = [(n_all, n) for n in range(n_all, min(FEWEST_DETAILED, n_all) - 1, -1)]
    sizes += [(n, min(n, FEWEST_DETAILED)) for n in range(n_all - 1, 0, -1)]
    for n_shown, n_detailed in sizes:
        text = _render(whole, whole.best(n_shown), whole.best(n_detailed))
        if text.count("\n") <= MOST_LINES:
            break
    return text


def _render(whole: Report, report: Report, detailed: Report) -> str:
    headings = table.titles(report)
    n_table, n_details = (len(whole.candidates) - len(r.candidates) for r in (report, detailed))
    more = [f"{n_table} more are in report.html and report.json.", ""] if n_table else []
    fewer = []
    if n_details > n_table:
        fewer = [f"What follows has the best {len(detailed.candidates)}; report.html has all.", ""]
    lines = [
        f"# {_safe(report.baseline.name)}: quantised versions compared",
        "",
        _line([_safe(title) for title in headings]),
        _line(["---", *["---:"] * (len(headings) - 1)]),
        *[_line([_safe(cell) for cell in row]) for row in table.rows(report)],
        "",
        *more,
        *[line for text in whole.notes for line in (f"Note: {_safe(text)}", "")],
        *[line for text in table.advice(whole) for line in (_safe(text), "")],
        *[line for text in table.proven(report) for line in (_safe(text), "")],
        *fewer,
        *_damage(detailed),
        *_verdicts(detailed),
        *_speed(whole),
        _how(report),
        "",
    ]
    return "\n".join(lines)


def _verdicts(report: Report) -> list[str]:
    """Comparisons of requested scores in words, then those of groups in a table."""
    lines: list[str] = []
    for score, sentences in table.verdicts(report).items():
        bullets = [f"- {_safe(name)}: {words}" for name, words in sentences]
        lines += [f"## {_safe(score)} against the source", ""]
        if report.is_guessed(score):
            lines += [table.GUESSED, ""]
        lines += [*bullets, ""]
    if groups := table.groups(report):
        headings, rows = groups
        lines += ["## By group, in points against the source", ""]
        lines += [_line([_safe(cell) for cell in headings])]
        lines += [_line(["---", *["---:"] * (len(headings) - 1)])]
        lines += [_line([_safe(cell) for cell in row]) for row in rows]
        lines += ["", "With 95% intervals; ! marks what is real after correction.", ""]
    return lines


def _damage(report: Report) -> list[str]:
    """What each candidate certainly loses most of."""
    rows, headings = damage.rows(report.document), damage.headings(report.document)
    if not rows:
        return []
    return [
        f"## {damage.TITLE}",
        "",
        _line([name.lower() for name in headings]),
        _line(["---:" if name in damage.GENERATED else "---" for name in headings]),
        *[_line([_safe(cell) for cell in row]) for row in rows],
        "",
        damage.caption(report.document),
        "",
    ]


def _speed(report: Report) -> list[str]:
    """Serving speed, limited to a few rows."""
    rows = speed.rows(report.speed)
    if not rows:
        return []
    more = len(rows) - MOST_SPEEDS
    lines = ["## How fast they serve", "", _line([_safe(title) for title in speed.TITLES])]
    lines += [_line(["---", "---", "---", *["---:"] * (len(speed.TITLES) - 3)])]
    lines += [_line([_safe(cell) for cell in row]) for row in rows[:MOST_SPEEDS]]
    lines += ["", f"{more} more are in report.html and report.json."] if more > 0 else []
    return [*lines, "", speed.how(report.speed), ""]


def _how(report: Report) -> str:
    settings = report.baseline.settings
    score = report.baseline.scores[report.headline]
    tasks = ", ".join(f"{_safe(name)} (version {_safe(v)})" for name, v in settings.tasks.items())
    limit = f", the first {settings.limit} documents of each" if settings.limit else ""
    counted = metrics.of(report.headline).counts
    return (
        f"Scored with lm-eval {report.baseline.versions['lm_eval']}: {tasks}{limit}; "
        f"windows of {settings.max_length:,} tokens; {score.n:,} {counted}{_how_sure(report)}. "
        "Sizes are those of the tensors; bits per weight count every weight of the model, "
        "embeddings included."
    )


def _how_sure(report: Report) -> str:
    """What an accuracy's difference has to exceed to mean anything."""
    if report.accuracy is None:
        return ""
    score = report.baseline.scores[report.accuracy]
    error = f" with a standard error of {100 * score.stderr:.1f} points" if score.stderr else ""
    return f"; {score.n:,} questions{error}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _safe(text: str) -> str:
    """A model's name is untrusted text: no markup, no new columns."""
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return " ".join(text.split())
