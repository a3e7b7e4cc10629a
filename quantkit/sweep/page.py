"""The report on a sweep as one page."""

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from markupsafe import Markup

from quantkit import __version__, metrics
from quantkit.page.document import Section, document
from quantkit.page.heatmap import heatmap
from quantkit.page.parts import Fact, facts, notices
from quantkit.page.scale import Axis
from quantkit.page.scatter import Point, scatter
from quantkit.page.table import Cell, Column, table
from quantkit.report import cells
from quantkit.report.document import Entry
from quantkit.storage import duration, gib
from quantkit.sweep.overview import PAGES, ModelReport, Overview

SEARCHABLE = 8


def render(found: Overview) -> str:
    """The whole page."""
    sections = [
        Section("Everything side by side", _everything(found)),
        Section("Recipes against calibration sets", list(_maps(found))),
        Section("Model by model", [_models(found)] if found.models else []),
        Section("Failed steps", [_given_up(found)] if found.given_up else []),
        Section("What it took", [_spent(found)]),
    ]
    return document(
        "Sweep: " + (", ".join(model.label for model in found.models) or "no results yet"),
        [section for section in sections if any(section.parts)],
        kind="Sweep report",
        lead=_lead(found),
        top=[notices("Read this first", _warnings(found)), facts(_facts(found))],
        footer=f"Written by quantkit {__version__}. This page loads nothing from the network.",
    )


def _lead(found: Overview) -> str:
    n_models, n = len(found.models), sum(len(m.document.candidates) for m in found.models)
    return (
        f"{n} quantised version{'s' * (n != 1)} of {n_models} model{'s' * (n_models != 1)}, each "
        "scored on the same questions as its source."
    )


def _warnings(found: Overview) -> list[str]:
    warnings = []
    if found.given_up:
        n = len(found.given_up)
        warnings.append(f"{n} step{'s' * (n > 1)} of this sweep failed; see the end.")
    warnings += [f"{m.label}: {note}" for m in found.models for note in m.document.notes]
    warnings += [
        f"Gate of {m.label}: {m.gate['outcome']}."
        for m in found.models
        if m.gate is not None and m.gate["outcome"] != "pass"
    ]
    return warnings


def _facts(found: Overview) -> list[Fact]:
    n = sum(len(m.document.candidates) for m in found.models)
    return [
        Fact(str(len(found.models)), "model" if len(found.models) == 1 else "models"),
        Fact(str(n), "candidate" if n == 1 else "candidates"),
        Fact(str(sum(s.n_done for s in found.spent)), "steps done"),
        Fact(duration(sum(s.seconds for s in found.spent)), "of work"),
    ]


def _everything(found: Overview) -> list[str | Markup]:
    judged = any(model.gate is not None for model in found.models)
    several = len(found.models) > 1
    columns = [
        Column("Candidate"),
        *([Column("Model")] if several else []),
        Column("Worth a look"),
        Column("Size", numeric=True, note="in memory"),
        Column("Bits", numeric=True, note="per weight"),
        Column("Change", numeric=True, note="headline score"),
        Column("Accuracy", numeric=True, note="change, points"),
        Column("Calibrated on"),
        *([Column("Gate")] if judged else []),
        Column("Made in", numeric=True),
    ]
    rows: list[list[Cell | str | Markup]] = []
    for model in found.models:
        report = model.document
        for entry in report.candidates:
            made = entry.made
            answer = model.answer(entry.name)
            rows.append(
                [
                    entry.name,
                    *([model.label] if several else []),
                    cells.badge(report, entry),
                    Cell(gib(entry.size_bytes), entry.size_bytes),
                    Cell(f"{entry.bits_per_weight:.2f}", entry.bits_per_weight),
                    cells.change(report, entry, report.headline) if report.headline else "",
                    cells.change(report, entry, report.accuracy) if report.accuracy else "",
                    (made.calibration or "no data") if made else "",
                    *([_answer(answer)] if judged else []),
                    Cell(duration(made.seconds), made.seconds)
                    if made and made.seconds is not None
                    else cells.unknown(),
                ]
            )
    if not rows:
        return []
    caption = "Candidates of all models, each against its own source"
    parts: list[str | Markup] = [
        table(caption, columns, rows, searchable=len(rows) > SEARCHABLE, wide=True)
    ]
    dots = [
        Point(e.name, e.bits_per_weight, shift, group=m.label if several else "")
        for m in found.models
        for e in m.document.candidates
        if (shift := _shift(m, e)) is not None
    ]
    if len(dots) > 1:
        parts.append(
            scatter(
                "What fewer bits cost",
                dots,
                Axis("bits per weight", digits=2),
                Axis("change of perplexity", percent=True),
                note="Against each model's own source. Lower is better.",
            )
        )
    return parts


def _answer(answer: str) -> Cell:
    if answer == "pass":
        return Cell(answer, tone="good")
    return Cell(answer, tone="bad") if answer == "fail" else Cell(answer, tone="quiet")


def _shift(model: ModelReport, entry: Entry) -> float | None:
    name = model.document.headline or ""
    before, after = model.document.baseline.scores.get(name), entry.scores.get(name)
    if metrics.of(name).name != metrics.PERPLEXITY or before is None or after is None:
        return None
    return after.value / before.value - 1


def _maps(found: Overview) -> Iterator[Markup]:
    """For recipes made with several sets: which set suits each."""
    for model in found.models:
        cells_of: dict[tuple[str, str], float] = {}
        for entry in model.document.candidates:
            shift = _shift(model, entry)
            if shift is not None and entry.made and entry.made.calibration and entry.recipe:
                cells_of[entry.recipe, entry.made.calibration] = shift
        recipes = list(dict.fromkeys(recipe for recipe, _ in cells_of))
        sets = list(dict.fromkeys(chosen for _, chosen in cells_of))
        if len(sets) > 1:
            values = [[cells_of.get((recipe, chosen)) for chosen in sets] for recipe in recipes]
            title = f"{model.label}: change of {model.document.headline}"
            yield heatmap(title, recipes, sets, values, Axis("change", percent=True))


def _models(found: Overview) -> Markup:
    columns = [
        Column("Model"),
        Column("Recommended"),
        Column("Candidates", numeric=True),
        Column("Source", numeric=True, note="size"),
        Column("Full report"),
    ]
    rows: list[list[Cell | str | Markup]] = []
    for model in found.models:
        report = model.document
        page = f"{PAGES}/{model.label}/report.html"
        rows.append(
            [
                model.label,
                (report.recommended.name if report.recommended else None) or "none",
                Cell(str(len(report.candidates)), len(report.candidates)),
                Cell(gib(report.baseline.size_bytes), report.baseline.size_bytes),
                Markup('<a href="{}">{}</a>').format(quote(page), page),
            ]
        )
    return table("Each model has a report of its own", columns, rows)


def _given_up(found: Overview) -> Markup:
    columns = [Column("Step"), Column("Why"), Column("Log")]
    rows: Sequence[list[Cell | str | Markup]] = [
        [lost.title, lost.error, lost.log] for lost in found.given_up
    ]
    return table("Steps that failed", columns, rows, searchable=len(rows) > SEARCHABLE)


def _spent(found: Overview) -> Markup:
    columns = [
        Column("Step"),
        Column("Done", numeric=True),
        Column("Of", numeric=True),
        Column("Time", numeric=True, note="all together"),
    ]
    rows: list[list[Cell | str | Markup]] = [
        [
            spent.kind,
            Cell(str(spent.n_done), spent.n_done),
            Cell(str(spent.n_steps), spent.n_steps),
            Cell(duration(spent.seconds), spent.seconds),
        ]
        for spent in found.spent
    ]
    return table("Work by kind of step", columns, rows, sortable=False)
