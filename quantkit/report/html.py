"""The report as a page: one file that a team opens, sorts and decides by."""

import re
from collections.abc import Sequence

from markupsafe import Markup

from quantkit import metrics
from quantkit.hardware import gpus
from quantkit.page.document import Section, document
from quantkit.page.parts import Fact, details, facts, notices
from quantkit.page.table import Cell, Column, table
from quantkit.report import cells, damage, evidence, pictures, speed
from quantkit.report.document import Comparison, Document, Entry
from quantkit.report.table import GUESSED
from quantkit.scoring.paired import ALPHA
from quantkit.storage import duration, gib

SEARCHABLE = 8


def render(report: Document, quantkit: str) -> str:
    """The whole page; the same report gives the same bytes."""
    sections = [
        Section("Which one to use", [_reason(report), _table(report)]),
        Section("Quality against size", pictures.against_size(report)),
        Section("How fast they serve", speed.parts(report)),
        Section("Is a difference real?", _verdicts(report)),
        Section(damage.TITLE, damage.parts(report)),
        Section("Accuracy by group of tasks", pictures.groups(report)),
        Section("How far predictions moved", pictures.divergence(report)),
        Section("Which layers hurt", pictures.layer_maps(report)),
        Section("How they were made", [_more(report), *pictures.cost(report)]),
        Section("How it was measured", _how(report)),
    ]
    return document(
        f"{report.baseline.name}: quantised versions compared",
        [section for section in sections if any(section.parts)],
        kind="Quality report",
        lead=_lead(report),
        top=[notices("Read this first", _warnings(report)), facts(_facts(report))],
        footer=f"Written by quantkit {quantkit}. This page loads nothing from the network.",
    )


def _lead(report: Document) -> str:
    chosen = report.recommended.name if report.recommended else None
    n = len(report.candidates)
    what = f"{n} version{'' if n == 1 else 's'} of the model next to the original."
    return f"{what} Recommended: {chosen}." if chosen else f"{what} No candidate is recommended."


def _reason(report: Document) -> str:
    if report.recommended is None:
        return ""
    reason = report.recommended.reason
    if report.recommended.name is None:
        return f"{reason[:1].upper()}{reason[1:]}."
    return (
        f"{report.recommended.name} is {reason}. Candidates that no other beats in both size and "
        "quality are called the best of their size."
    )


def _facts(report: Document) -> list[Fact]:
    found = [Fact(gib(report.baseline.size_bytes), "size of the source")]
    if report.headline:
        score = report.baseline.scores[report.headline]
        found.append(
            Fact(metrics.shown(report.headline, score.value), f"{report.headline} of the source")
        )
    if report.accuracy:
        score = report.baseline.scores[report.accuracy]
        found.append(
            Fact(metrics.shown(report.accuracy, score.value), f"{report.accuracy} of the source")
        )
        found.append(Fact(f"{score.n:,}", "questions"))
    return found


def _warnings(report: Document) -> list[str]:
    warnings = list(report.notes)
    if any(c.source_at_chance and c.score == report.accuracy for c in _comparisons(report)):
        warnings.append(f"{report.accuracy}: {GUESSED[:1].lower()}{GUESSED[1:]}")
    without = [entry.name for entry in report.candidates if not entry.comparisons]
    if without:
        warnings.append(
            f"{_listed(without)}: the single answers are missing, so it is unknown whether its "
            "differences are real; keep the Parquet files next to the scores."
        )
    return warnings


def _comparisons(report: Document) -> list[Comparison]:
    return [comparison for entry in report.candidates for comparison in entry.comparisons]


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _table(report: Document) -> Markup:
    """One row per model, the source first: what to decide by."""
    columns = [
        Column("Model"),
        Column("Size", numeric=True, note="of source"),
        Column("Bits", numeric=True, note="per weight"),
    ]
    scored = evidence.columns(
        (report.headline, report.accuracy),
        report.baseline.settings.tasks,
        report.groups,
        report.baseline.scores,
    )
    for name in scored:
        task = name.partition("/")[0]
        metric = metrics.of(name)
        # The values of others end in a percent sign; the note must not widen the column.
        note = "points, 95%" if metric.is_share else "95% interval"
        columns += [
            Column(metric.heading, numeric=True, note=task),
            Column("Change", numeric=True, note=note),
        ]
    kl = _divergence_names(report)
    columns += [Column(title, numeric=True, note=note) for title, note in kl.values()]
    rows = [
        _row(report, entry, scored, list(kl)) for entry in (report.baseline, *report.candidates)
    ]
    return table(
        "The source first, then from best to worst",
        columns,
        rows,
        searchable=len(rows) > SEARCHABLE,
        wide=True,
    )


def _row(
    report: Document, entry: Entry, scored: Sequence[str], kl: Sequence[str]
) -> list[Cell | str | Markup]:
    source = entry is report.baseline
    ratio = entry.size_bytes / report.baseline.size_bytes
    row: list[Cell | str | Markup] = [
        cells.model(report, entry),
        Cell(
            Markup("{}<small>{}</small>").format(gib(entry.size_bytes), f"{ratio:.1%}"),
            entry.size_bytes,
        ),
        Cell(f"{entry.bits_per_weight:.2f}", entry.bits_per_weight),
    ]
    for name in scored:
        score = entry.scores.get(name)
        row.append(
            Cell(metrics.shown(name, score.value), score.value) if score else cells.unknown()
        )
        row.append(Cell("") if source else cells.change(report, entry, name))
    for name in kl:
        score = entry.scores.get(name)
        known = score is not None and not source
        row.append(
            Cell(metrics.shown(name, score.value), score.value) if known and score else Cell("")
        )
    return row


def _more(report: Document) -> Markup:
    """What else is worth knowing about each, besides quality."""
    proven = any(entry.verified for entry in report.candidates)
    columns = [
        Column("Model"),
        Column("Format", note="method"),
        Column("On disk", numeric=True),
        Column("Made in", numeric=True),
        Column("Peak memory", numeric=True, note="of GPU or host"),
        Column("Calibrated on"),
        Column("Runs natively on"),
        *([Column("Proven in")] if proven else []),
    ]
    rows: list[list[Cell | str | Markup]] = []
    for entry in (report.baseline, *report.candidates):
        made = entry.made
        peak = (made.peak_device_bytes or made.peak_host_bytes) if made else None
        rows.append(
            [
                entry.name,
                Markup("{}<small>{}</small>").format(
                    entry.format, (made.by_others or made.method) if made else ""
                ),
                Cell(gib(made.disk_bytes), made.disk_bytes) if made else cells.unknown(),
                Cell(duration(made.seconds), made.seconds)
                if made and made.seconds is not None
                else cells.unknown(),
                Cell(gib(peak), peak) if peak else cells.unknown(),
                (made.calibration or ("" if made.by_others else "no data")) if made else "",
                entry.gpus or "",
                *([entry.verified.short if entry.verified else ""] if proven else []),
            ]
        )
    return table(
        "How each was made, and where it runs",
        columns,
        rows,
        searchable=len(rows) > SEARCHABLE,
        wide=True,
    )


def _verdicts(report: Document) -> list[str | Markup]:
    """A table per requested score: the verdicts from individual answers."""
    parts: list[str | Markup] = []
    columns = [Column("Model"), Column("Against the source"), Column("p", True, "adjusted")]
    for score in dict.fromkeys(c.score for c in _comparisons(report)):
        if score.rpartition("/")[0] not in report.baseline.settings.tasks:
            continue
        rows: list[list[Cell | str | Markup]] = []
        for entry in report.candidates:
            if (found := entry.comparison(score)) is not None:
                real = found.adjusted_p < ALPHA
                verdict = Cell(found.verdict) if real else Cell(found.verdict, tone="quiet")
                rows.append(
                    [entry.name, verdict, Cell(f"{found.adjusted_p:.4f}", found.adjusted_p)]
                )
        parts.append(table(score, columns, rows, searchable=len(rows) > 2 * SEARCHABLE))
    if not parts:
        return []
    return [
        "Candidates answer the same questions as the source, so answers are compared one by one; "
        "p-values are adjusted for the number of candidates (Holm). Differences in grey are "
        "not significant.",
        *parts,
    ]


def _divergence_names(report: Document) -> dict[str, tuple[str, str]]:
    """Title and small print of every column that shows how far predictions moved."""
    task = (report.headline or "").partition("/")[0]
    known = [metrics.of(name) for name in metrics.distances()]
    return {
        f"{task}/{metric.name}": (
            _in_two(metric.heading) if metric.is_share else (metric.heading, metric.unit)
        )
        for metric in known
        if any(f"{task}/{metric.name}" in entry.scores for entry in report.candidates)
    }


def _in_two(heading: str) -> tuple[str, str]:
    first, _, rest = heading.partition(" ")
    return first, rest


def _how(report: Document) -> list[str | Markup]:
    settings = report.baseline.settings
    method = {
        "Tasks": ", ".join(f"{name} (version {v})" for name, v in settings.tasks.items()),
        "Documents": f"the first {settings.limit} of each" if settings.limit else "all",
        "Few-shot examples": "as the task says"
        if settings.num_fewshot is None
        else str(settings.num_fewshot),
        "Window": f"{settings.max_length:,} tokens",
        "Computed in": settings.dtype,
        "Seed": str(settings.seed),
    }
    rows = [
        [
            entry.name,
            gpus.label(entry.device),
            _moment(entry.created),
            Markup("<code>{}</code>").format(entry.digest[:16]),
        ]
        for entry in (report.baseline, *report.candidates)
    ]
    columns = [
        Column("Model"),
        Column("Scored on"),
        Column("When"),
        Column("Digest"),
    ]
    return [
        details(method),
        table("What was scored", columns, rows, searchable=len(rows) > SEARCHABLE, wide=True),
    ]


def _moment(created: str) -> str:
    """A time to the minute; reports of others may write it in other ways."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d\+00:00", created)
    return f"{found[1]} {found[2]} UTC" if found else created
