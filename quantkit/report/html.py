"""The report as a page: one file that a team opens, sorts and decides by."""

from collections.abc import Sequence
from typing import Literal

from markupsafe import Markup

from quantkit.page.bars import Bar, bars
from quantkit.page.document import Section, document
from quantkit.page.heatmap import heatmap
from quantkit.page.lines import Series, lines
from quantkit.page.parts import Fact, details, facts, notices
from quantkit.page.scale import Axis
from quantkit.page.scatter import Point, scatter
from quantkit.page.table import Cell, Column, table
from quantkit.report import layers
from quantkit.report.document import Comparison, Document, Entry
from quantkit.report.table import GUESSED
from quantkit.score.paired import ALPHA
from quantkit.score.scorecard import KL_QUANTILES
from quantkit.storage import duration, gib

SHOWN = 8
"""Candidates that a picture has room for; all are in tables."""
SERIES = 6
MAPS = 4
WORST = 30
EACH = 3
SEARCHABLE = 8


def render(report: Document, quantkit: str) -> str:
    """The whole page; the same report gives the same bytes."""
    sections = [
        Section("Which to take", [_reason(report), _table(report)]),
        Section("Quality against size", _against_size(report)),
        Section("Is a difference real?", _verdicts(report)),
        Section("Accuracy by group of tasks", _groups(report)),
        Section("How far predictions moved", _divergence(report)),
        Section("Which layers hurt", _layers(report)),
        Section("How they were made", [_more(report), *_cost(report)]),
        Section("How it was measured", _how(report)),
    ]
    return document(
        f"{report.baseline.name}: quantised versions compared",
        [section for section in sections if any(section.parts)],
        kind="Quality report",
        lead=_lead(report),
        top=[notices("To know before reading on", _warnings(report)), facts(_facts(report))],
        footer=f"Written by quantkit {quantkit}. Nothing on this page is loaded from elsewhere.",
    )


def _lead(report: Document) -> str:
    chosen = report.recommended.name if report.recommended else None
    n = len(report.candidates)
    what = f"{n} version{'' if n == 1 else 's'} of the model beside the original."
    return f"{what} Recommended: {chosen}." if chosen else f"{what} None is recommended."


def _reason(report: Document) -> str:
    if report.recommended is None:
        return ""
    told = report.recommended.reason
    if report.recommended.name is None:
        return f"{told[:1].upper()}{told[1:]}."
    return (
        f"{report.recommended.name} is {told}. Candidates that no other beats in both size and "
        "quality are called the best of their size."
    )


def _facts(report: Document) -> list[Fact]:
    found = [Fact(gib(report.baseline.size_bytes), "size of the source")]
    if report.headline:
        score = report.baseline.scores[report.headline]
        found.append(
            Fact(_number(score.value, report.headline), f"{report.headline} of the source")
        )
    if report.accuracy:
        score = report.baseline.scores[report.accuracy]
        found.append(Fact(f"{score.value:.1%}", f"{report.accuracy} of the source"))
        found.append(Fact(f"{score.n:,}", "questions"))
    return found


def _warnings(report: Document) -> list[str]:
    said = list(report.notes)
    if any(c.source_at_chance and c.score == report.accuracy for c in _comparisons(report)):
        said.append(f"{report.accuracy}: {GUESSED}")
    without = [entry.name for entry in report.candidates if not entry.comparisons]
    if without:
        said.append(
            f"{_listed(without)}: answers one by one are missing, so nothing says whether its "
            "differences are real; keep the Parquet files beside the scores."
        )
    return said


def _comparisons(report: Document) -> list[Comparison]:
    return [comparison for entry in report.candidates for comparison in entry.comparisons]


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _table(report: Document) -> Markup:
    """One row a model, the source first: what to decide by."""
    columns = [
        Column("Model"),
        Column("Worth a look"),
        Column("Size", numeric=True, note="in memory"),
        Column("Of source", numeric=True),
        Column("Bits", numeric=True, note="per weight"),
    ]
    scored = [name for name in (report.headline, report.accuracy) if name]
    for name in scored:
        task, _, metric = name.partition("/")
        columns += [
            Column(metric.capitalize(), numeric=True, note=task),
            Column("Change", numeric=True, note="95% interval"),
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
        f"{entry.name} (source)" if source else entry.name,
        _worth(report, entry),
        Cell(gib(entry.size_bytes), entry.size_bytes),
        Cell(f"{ratio:.1%}", ratio),
        Cell(f"{entry.bits_per_weight:.2f}", entry.bits_per_weight),
    ]
    for name in scored:
        score = entry.scores.get(name)
        row.append(Cell(_number(score.value, name), score.value) if score else _unknown())
        row.append(Cell("") if source else _change(report, entry, name))
    for name in kl:
        score = entry.scores.get(name)
        known = score is not None and not source
        row.append(Cell(_small(name, score.value), score.value) if known and score else Cell(""))
    return row


def _more(report: Document) -> Markup:
    """What is good to know of each besides quality."""
    columns = [
        Column("Model"),
        Column("Format"),
        Column("Method"),
        Column("On disk", numeric=True),
        Column("Made in", numeric=True),
        Column("Peak memory", numeric=True, note="of GPU or host"),
        Column("Calibrated on"),
        Column("Runs natively on"),
    ]
    rows: list[list[Cell | str | Markup]] = []
    for entry in (report.baseline, *report.candidates):
        made = entry.made
        peak = (made.peak_device_bytes or made.peak_host_bytes) if made else None
        rows.append(
            [
                entry.name,
                entry.format,
                made.method if made else "",
                Cell(gib(made.disk_bytes), made.disk_bytes) if made else _unknown(),
                Cell(duration(made.seconds), made.seconds) if made else _unknown(),
                Cell(gib(peak), peak) if peak else _unknown(),
                (made.calibration or "no data") if made else "",
                entry.gpus or "",
            ]
        )
    return table(
        "How each was made, and where it runs",
        columns,
        rows,
        searchable=len(rows) > SEARCHABLE,
        wide=True,
    )


def _worth(report: Document, entry: Entry) -> Cell:
    if report.recommended and entry.name == report.recommended.name:
        return Cell("recommended", 2, "good")
    return Cell("best of its size", 1) if entry.pareto else Cell("", 0)


def _change(report: Document, entry: Entry, name: str) -> Cell:
    """Against the source, with the interval where answers are paired."""
    before, after = report.baseline.scores.get(name), entry.scores.get(name)
    if before is None or after is None:
        return _unknown()
    found = entry.comparison(name)
    if name.endswith("/perplexity") and before.value:
        shift = found.ratio - 1 if found and found.ratio else after.value / before.value - 1
        ends = (found.low, found.high) if found else (None, None)
        told = f"{shift:+.2%}"
        between = ""
        if ends[0] is not None and ends[1] is not None:
            between = f"{ends[0] - 1:+.2%} to {ends[1] - 1:+.2%}"
        worse = shift > 0
    else:
        shift = found.difference if found and found.difference is not None else 0.0
        shift = shift if found else after.value - before.value
        told, between = f"{100 * shift:+.1f}", ""
        if found and found.low is not None and found.high is not None:
            between = f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
        worse = shift < 0
    real = found is not None and found.adjusted_p < ALPHA and not found.source_at_chance
    text = Markup("{}<small>{}</small>").format(told, between) if between else told
    return Cell(text, shift, _tone(worse, real))


def _against_size(report: Document) -> list[str | Markup]:
    name = report.headline
    if name is None or not report.candidates:
        return []
    perplexity = name.endswith("/perplexity")
    unit = 1 << 30 if report.baseline.size_bytes >= 1 << 30 else 1 << 20
    points = []
    for entry in report.candidates:
        cell = _change(report, entry, name)
        if cell.value is None:
            continue
        found = entry.comparison(name)
        interval = None
        if found and found.low is not None and found.high is not None:
            less = 1 if perplexity else 0
            interval = (found.low - less, found.high - less)
        points.append(
            Point(
                entry.name,
                entry.size_bytes / unit,
                cell.value,
                interval,
                entry.format,
                entry.pareto,
            )
        )
    y = Axis(f"change of {name}", percent=True)
    return [
        scatter(
            "Size and what it costs",
            points,
            Axis("GiB in memory" if unit == 1 << 30 else "MiB in memory", digits=2),
            y,
            front="nothing is both smaller and better",
            note="Bars are 95% intervals of the change against the source. "
            + ("Lower is better." if perplexity else "Higher is better."),
        )
    ]


def _verdicts(report: Document) -> list[str | Markup]:
    """A table for each score that was asked for: what answers one by one say."""
    parts: list[str | Markup] = []
    columns = [Column("Model"), Column("Against the source"), Column("p", True, "adjusted")]
    for score in dict.fromkeys(c.score for c in _comparisons(report)):
        task, _, metric = score.rpartition("/")
        if task not in report.baseline.settings.tasks or metric == "acc_norm":
            continue
        rows: list[list[Cell | str | Markup]] = []
        for entry in report.candidates:
            if (found := entry.comparison(score)) is not None:
                real = found.adjusted_p < ALPHA
                told = Cell(found.verdict) if real else Cell(found.verdict, tone="quiet")
                rows.append([entry.name, told, Cell(f"{found.adjusted_p:.4f}", found.adjusted_p)])
        parts.append(table(score, columns, rows, searchable=len(rows) > 2 * SEARCHABLE))
    if not parts:
        return []
    return [
        "Candidates answer the same questions as the source, so answers are compared one by one; "
        "p-values are adjusted for the number of candidates (Holm). Grey is what is not shown.",
        *parts,
    ]


def _groups(report: Document) -> list[str | Markup]:
    """Changes of accuracy where tasks come in groups."""
    asked = report.baseline.settings.tasks
    names = [g for g in report.groups if g not in asked]
    values: list[list[float | None]] = []
    cells: list[list[Cell | str | Markup]] = []
    for entry in report.candidates:
        found = [entry.comparison(f"{group}/acc") for group in names]
        values.append([_points(c) for c in found])
        cells.append([entry.name, *(_group_cell(c) for c in found)])
    kept = [i for i in range(len(names)) if any(line[i] is not None for line in values)]
    if not kept:
        return []
    shown = values[:SHOWN]
    return [
        heatmap(
            "Points lost or gained",
            [entry.name for entry in report.candidates[:SHOWN]],
            [names[i] for i in kept],
            [[line[i] for i in kept] for line in shown],
            Axis("points against the source", digits=1),
        ),
        table(
            "Points against the source, with 95% intervals",
            [Column("Model"), *(Column(names[i], numeric=True) for i in kept)],
            [[row[0], *(row[i + 1] for i in kept)] for row in cells],
            searchable=len(cells) > SEARCHABLE,
            wide=len(kept) > 4,
        ),
    ]


def _points(found: Comparison | None) -> float | None:
    return 100 * found.difference if found and found.difference is not None else None


def _tone(is_worse: bool, is_real: bool) -> Literal["", "good", "bad"]:
    """Colour only for what is shown to differ."""
    if not is_real:
        return ""
    return "bad" if is_worse else "good"


def _group_cell(found: Comparison | None) -> Cell:
    if found is None or found.difference is None or found.low is None or found.high is None:
        return _unknown()
    real = found.adjusted_p < ALPHA and not found.source_at_chance
    tone = _tone(found.difference < 0, real)
    ends = f"{100 * found.low:+.1f} to {100 * found.high:+.1f}"
    text = Markup("{}<small>{}</small>").format(f"{100 * found.difference:+.1f}", ends)
    return Cell(text, found.difference, tone)


def _divergence_names(report: Document) -> dict[str, tuple[str, str]]:
    task = (report.headline or "").partition("/")[0]
    titles = {
        "kl_mean": ("KL", "mean, nats"),
        "kl_p99": ("KL", "99th percentile"),
        "top1_agreement": ("Same word", "likeliest token"),
    }
    return {
        f"{task}/{name}": title
        for name, title in titles.items()
        if any(f"{task}/{name}" in entry.scores for entry in report.candidates)
    }


def _divergence(report: Document) -> list[str | Markup]:
    task = (report.headline or "").partition("/")[0]
    series = []
    for entry in _pictured(report, SERIES, report.candidates):
        points = [
            (1 - share, entry.scores[f"{task}/{name}"].value)
            for name, share in KL_QUANTILES.items()
            if f"{task}/{name}" in entry.scores
        ]
        if len(points) > 1:
            series.append(Series(entry.name, sorted(points)))
    if not series:
        return []
    return [
        "The Kullback-Leibler divergence of each token's prediction from the source's, in nats: "
        "an average hides the few tokens where a model goes astray.",
        lines(
            "Divergence of the worst tokens",
            series,
            Axis("share of tokens that are further away", log=True, percent=True),
            Axis("divergence, nats", log=True),
            note="To the left are the worst tokens.",
        ),
    ]


def _pictured(report: Document, most: int, among: Sequence[Entry]) -> list[Entry]:
    """Candidates that get a picture: the recommended one, the front, then the best."""
    chosen = report.recommended.name if report.recommended else None
    ranked = sorted(among, key=lambda e: (e.name != chosen, not e.pareto))[:most]
    return [entry for entry in among if entry in ranked]


def _layers(report: Document) -> list[str | Markup]:
    """The worst layers of all, and a map of the errors of some candidates."""
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
        "for recipes without data the error of the weight itself.",
        table(
            f"The worst {EACH} layers of each",
            [Column("Layer"), Column("Model"), Column("Error", numeric=True), Column("Of the")],
            [[w.layer, w.candidate, Cell(f"{w.error:.2e}", w.error), w.what] for w in worst],
        ),
    ]
    # Errors of weights alone look the same all over.
    told = [entry for entry in known if entry.made and layers.grid(entry.made.layers).is_output]
    for entry in _pictured(report, MAPS, told or known):
        if entry.made is None:
            continue
        found = layers.grid(entry.made.layers)
        what = "error of the output" if found.is_output else "error of the weight"
        axis = Axis(f"{what}, relative", log=True)
        parts.append(
            heatmap(entry.name, found.kinds, found.blocks, found.values, axis, note=found.outside)
        )
    return parts


def _cost(report: Document) -> list[str | Markup]:
    made = [(entry.name, entry.made) for entry in report.candidates if entry.made]
    if not made:
        return []
    return [
        bars(
            "Time of the run that made it",
            [Bar(name, m.seconds) for name, m in made[: 3 * SHOWN]],
            Axis("seconds", digits=1),
            note="Recipes that were made in one run share its time.",
        ),
        bars(
            "Most memory that was in use",
            [
                Bar(name, (m.peak_device_bytes or m.peak_host_bytes) / (1 << 30))
                for name, m in made[: 3 * SHOWN]
            ],
            Axis("GiB", digits=2),
            note="Of the GPU, or of the host where none was used.",
        ),
    ]


def _how(report: Document) -> list[str | Markup]:
    settings = report.baseline.settings
    told = {
        "Tasks": ", ".join(f"{name} (version {v})" for name, v in settings.tasks.items()),
        "Documents": f"the first {settings.limit} of each" if settings.limit else "all",
        "Examples before a question": "as the task says"
        if settings.num_fewshot is None
        else str(settings.num_fewshot),
        "Window": f"{settings.max_length:,} tokens",
        "Computed in": settings.dtype,
        "Seed": str(settings.seed),
    }
    rows = [
        [
            entry.name,
            entry.device,
            entry.created,
            entry.made.calibration or "" if entry.made else "",
            Markup("<code>{}</code>").format(entry.digest[:16]),
        ]
        for entry in (report.baseline, *report.candidates)
    ]
    columns = [
        Column("Model"),
        Column("Scored on"),
        Column("When"),
        Column("Calibrated on"),
        Column("Digest"),
    ]
    return [
        details(told),
        table("What was scored", columns, rows, searchable=len(rows) > SEARCHABLE),
    ]


def _number(value: float, name: str) -> str:
    return f"{value:.1%}" if name.endswith(("/acc", "/acc_norm")) else f"{value:.3f}"


def _small(name: str, value: float) -> str:
    return f"{value:.1%}" if name.endswith("top1_agreement") else f"{value:.4f}"


def _unknown() -> Cell:
    return Cell("", None, "quiet")
