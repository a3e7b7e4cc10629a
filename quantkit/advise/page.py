"""Recommendations as an HTML page that a team opens, filters by GPU and shares."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from markupsafe import Markup

from quantkit import __version__
from quantkit.advise import efficiency, not_considered, words
from quantkit.advise.candidates import Candidate
from quantkit.advise.recommendation import Recommendation
from quantkit.engine import label as engine_label
from quantkit.page.document import Section, document
from quantkit.page.heatmap import heatmap
from quantkit.page.parts import Fact, details, extract, facts, notices
from quantkit.page.scale import UNKNOWN, Axis
from quantkit.page.scatter import Point, scatter
from quantkit.page.table import Cell, Column, table

FIGURES = (
    Column("GiB", numeric=True, note="weights"),
    Column("Room", numeric=True, note="users"),
    Column("First token", numeric=True),
    Column("Each user", numeric=True, note="tokens/s"),
    Column("All users", numeric=True, note="tokens/s"),
    Column("Quality", numeric=True, note="share kept"),
)


def render(found: Sequence[Recommendation], commands: Mapping[str, str] | None = None) -> str:
    """The whole page, for one kind of GPU or several; commands, by what they do, for one."""
    return _one(found[0], commands or {}) if len(found) == 1 else _many(found)


def _one(found: Recommendation, commands: Mapping[str, str]) -> str:
    label = found.question.catalogue.shape.label
    where = words.on(found.gpu, found.question.count)
    chosen = found.chosen
    serving = [c for c in found.candidates if c.serves]
    sections = [
        Section("Why", _why(found)),
        Section("Commands", [extract(what, [], "", text) for what, text in commands.items()]),
        Section("Formats that fit", [_formats(serving, chosen)] if serving else []),
        Section("Speed and quality", [_picture(found)] if len(serving) > 1 else []),
        Section("Formats left out", _rest(found)),
        Section("Assumptions", _assumed([found])),
    ]
    lead = f"Serve it as {chosen.format.name}." if chosen else "No format fits this load."
    return document(
        f"{label} on {where}",
        [section for section in sections if any(section.parts)],
        kind="Recommendation",
        lead=f"{lead} {_load(found)}",
        top=[facts(_facts(chosen)) if chosen else notices("What would help", _ways(found))],
        footer=_footer(),
    )


def _many(found: Sequence[Recommendation]) -> str:
    """One model on several kinds of GPU, or several models on one."""
    question = found[0].question
    models = list(dict.fromkeys(one.question.catalogue.shape.label for one in found))
    where = words.on(found[0].gpu, question.count)
    several = len(models) > 1
    name = _model_name if several else _gpu_name
    what = "model" if several else "GPU"
    served = [one for one in found if one.chosen is not None]
    without = [name(one) for one in found if one.chosen is None]
    more = words.extra_parts(c for one in served for c in one.candidates)
    rows = [[name(one), *_choice(one, more)] for one in served]
    every = [
        [name(one), _name(c, one.chosen), *_figures(c, more)]
        for one in served
        for c in one.candidates
        if c.serves
    ]
    none_for = "for" if several else "on"
    sections = [
        Section(
            f"The choice {none_for} each {what}",
            [
                table(
                    f"For {words.BEST[question.objective]}",
                    [Column(f"{what[0].upper()}{what[1:]}"), Column("Choice"), *_columns(more)],
                    rows,
                    searchable=True,
                    wide=True,
                ),
                f"No format fits this load {none_for} {', '.join(without)}." if without else "",
            ],
        ),
        *_overview(served, name, what),
        Section(
            f"Every format {none_for} every {what}",
            [
                table(
                    f"Type a {what}'s name to see its formats",
                    [Column(f"{what[0].upper()}{what[1:]}"), Column("Format"), *_columns(more)],
                    every,
                    searchable=True,
                    dense=True,
                    wide=True,
                )
            ],
        ),
        Section("Assumptions", _assumed(found if several else found[:1])),
    ]
    title = f"{models[0]} on {len(found)} kinds of GPU{_each_with(question.count)}"
    lead = f"{len(served)} of {len(found)} can serve it. {_load(found[0])}"
    if several:
        title = f"{len(models)} models on {where}"
        lead = f"{len(served)} of {len(found)} can be served. {_load(found[0], of_all=True)}"
    return document(
        title,
        sections if served else sections[-1:],
        kind="Recommendation",
        lead=lead,
        footer=_footer(),
    )


def _gpu_name(found: Recommendation) -> str:
    return found.gpu.name


def _model_name(found: Recommendation) -> str:
    return found.question.catalogue.shape.label


def _each_with(count: int) -> str:
    return "" if count == 1 else f", {count} of each"


def _load(found: Recommendation, of_all: bool = False) -> str:
    """The load and the objective; contexts of several models may differ, so notes have them."""
    question = found.question
    load = question.load(question.users or 1)
    who = "As many users as fit" if question.users is None else words.users(load.users).capitalize()
    if question.users is None and question.objective != "throughput":
        who = "1 user"
    if of_all:
        return f"{who}; objective: {question.objective}."
    return (
        f"{who}, contexts of {load.context:,} tokens with answers of {load.answer:,}; "
        f"objective: {question.objective}."
    )


def _facts(chosen: Candidate) -> list[Fact]:
    speed, fit = chosen.speed, chosen.fit
    shown = []
    if speed is not None:
        shown.append(Fact(words.span(speed.each), "tokens/s per user"))
        if speed.first_token is not None:
            shown.append(Fact(words.span_of_seconds(speed.first_token), "to the first token"))
    if fit is not None:
        shown.append(Fact(f"{fit.users:,}", "users fit"))
    shown.append(Fact(words.quality_kept(chosen), "of the quality kept"))
    if chosen.cost is not None:
        shown.append(Fact(words.span(chosen.cost), "per million tokens"))
    return shown


def _why(found: Recommendation) -> list[str | Markup]:
    parts: list[str | Markup] = [f"{found.reason[:1].upper()}{found.reason[1:]}."]
    if found.chosen and found.chosen.fit:
        parts.append(f"Memory: {words.memory(found.chosen.fit)}.")
    if found.chosen and (shared := words.sharing(found.chosen, found.question)):
        parts.append(f"GPUs: {shared}.")
    if found.runner_up is not None:
        parts.append(f"The runner-up is {found.runner_up.format.name}: {found.runner_up_reason}.")
    if found.changes:
        parts.append(notices("What would change the choice", list(found.changes)))
    return parts


def _ways(found: Recommendation) -> list[str]:
    return [f"{way.says} ({way.change})" for way in found.remedies] or ["No single change helps."]


def _formats(serving: Sequence[Candidate], chosen: Candidate | None) -> Markup:
    priced = any(c.cost is not None for c in serving)
    more = words.extra_parts(serving)
    columns = [Column("Format"), *_columns(more)]
    rows = [[_name(c, chosen), *_figures(c, more)] for c in serving]
    if priced:
        columns.append(Column("Cost", numeric=True, note="per million tokens"))
        for row, candidate in zip(rows, serving, strict=True):
            cost = candidate.cost
            row.append(Cell(words.number(cost.typical), cost.typical) if cost else Cell(UNKNOWN))
    return table("Typical figures, best first", columns, rows, dense=True, wide=True)


def _name(candidate: Candidate, chosen: Candidate | None) -> Cell:
    return Cell(candidate.format.name, tone="good" if candidate is chosen else "")


def _columns(beside: Sequence[str]) -> list[Column]:
    """The usual ones, and one for each item beside the model's own weights."""
    named = [Column(name[:1].upper() + name[1:], numeric=True, note="GiB") for name in beside]
    return [FIGURES[0], *named, *FIGURES[1:]]


def _figures(candidate: Candidate, beside: Sequence[str] = ()) -> list[Cell | str | Markup]:
    speed, fit, quality = candidate.speed, candidate.fit, candidate.quality
    cells: list[Cell | str | Markup] = []
    for name in ("weights", *beside):
        size = fit.parts.get(name, 0) if fit else None
        cells.append(Cell(UNKNOWN if size is None else words.weights_gib(size), size))
    cells.append(Cell(f"{fit.users:,}" if fit else UNKNOWN, fit.users if fit else None))
    first = speed.first_token.typical if speed and speed.first_token else None
    cells.append(Cell(words.first_token(speed), first))
    for rate in (speed.each.typical, speed.total.typical) if speed else (None, None):
        cells.append(Cell(UNKNOWN if rate is None else words.number(rate), rate))
    cells.append(Cell(words.quality_kept(candidate), quality.recovery if quality else None))
    return cells


def _choice(found: Recommendation, beside: Sequence[str]) -> list[Cell | str | Markup]:
    chosen = found.chosen
    assert chosen is not None
    return [chosen.format.name, *_figures(chosen, beside)]


def _overview(
    served: Sequence[Recommendation], name: Callable[[Recommendation], str], what: str
) -> Iterator[Section]:
    """The objective's figure for each format, on each GPU or for each model; without GPUs whose
    speed is not known.
    """
    if not served:
        return
    question = served[0].question
    objective, meaning = question.objective, words.meaning(question)
    better = max if objective in ("throughput", "quality") else min
    figures: dict[str, dict[str, float]] = {}
    for one in served:
        for c in one.candidates:
            found = words.value(c, objective) if c.serves else None
            if found is not None:
                of_it = figures.setdefault(name(one), {})
                of_it[c.format.base] = better(found, of_it.get(c.format.base, found))
    known = {format for of_it in figures.values() for format in of_it}
    every = dict.fromkeys(f.base for one in served for f in one.question.catalogue.formats)
    formats = [format for format in every if format in known]
    axis = Axis(meaning, log=True)
    if objective == "quality":
        axis = Axis(meaning, digits=3)
    if not formats:
        return
    picture = heatmap(
        f"{meaning[:1].upper()}{meaning[1:]}, by format and {what}",
        formats,
        list(figures),
        [[of_it.get(format) for of_it in figures.values()] for format in formats],
        axis,
        note=f"{words.EITHER_CACHE} {words.EMPTY}",
    )
    yield Section("Overview", [picture])


def _picture(found: Recommendation) -> Markup:
    points = [
        Point(
            c.format.name,
            c.speed.each.typical,
            c.quality.recovery,
            group=engine_label(c.format.engine),
        )
        for c in found.candidates
        if c.speed is not None and c.quality is not None and c.lacks != "support"
    ]
    return scatter(
        "Speed against quality",
        points,
        Axis("tokens/s of one user, typical", log=True),
        Axis("share of the quality kept", digits=3),
        note="Formats that fit in memory, those of too low quality or speed included. Quality is a "
        "prior where no report of this model was given.",
    )


def _rest(found: Recommendation) -> list[str | Markup]:
    rows = [[c.format.name, c.problem] for c in found.candidates if not c.serves]
    title, columns = "Why each was left out", [Column("Format"), Column("Reason")]
    refused = [table(title, columns, rows, dense=True)] if rows else []
    more = not_considered.lines(found.question.catalogue)
    return [*refused, *(f"{line[:1].upper()}{line[1:]}." for line in more)]


def _assumed(found: Sequence[Recommendation]) -> list[str | Markup]:
    """What the answers rest on; several if they are of different models."""
    end = efficiency.of("vllm", found[0].gpu.vendor)
    slow, typical, fast = end
    rates = {
        "Share of peak bandwidth": (slow.bandwidth, typical.bandwidth, fast.bandwidth),
        "Share of bandwidth left by unpacking weights": (
            slow.unpacking,
            typical.unpacking,
            fast.unpacking,
        ),
        "Share of peak compute": (slow.compute, typical.compute, fast.compute),
        "Share of a link's peak rate": (slow.link, typical.link, fast.link),
    }
    shown = {name: f"{a:.2f}, {b:.2f}, {c:.2f}" for name, (a, b, c) in rates.items()}
    parts: list[str | Markup] = [
        *words.notes_by_model(found),
        "Slow, typical and fast values assumed for vLLM:",
        details(shown),
    ]
    for one in found:
        of_one = f" for {_model_name(one)}" if len(found) > 1 else ""
        parts += [f"Sources of the quality figures{of_one}:", details(_quality_sources(one))]
    return parts


def _quality_sources(found: Recommendation) -> dict[str, str]:
    qualities = {
        c.format.name: f"{words.quality_kept(c)}: {c.quality.basis}{_from(c.quality.source)}"
        for c in found.candidates
        if c.quality is not None and c.quality.source and not c.format.has_fp8_cache
    }
    caches = (c.quality.cache for c in found.candidates if c.quality is not None)
    if cache := next(filter(None, caches), None):
        kept = f"{words.kept(cache)}: {cache.basis}{_from(cache.source)}"
        qualities["FP8 KV cache (a factor on the weights' own)"] = kept
    return qualities


def _from(source: str) -> str:
    return f" ({source})" if source else ""


def _footer() -> str:
    return f"Written by quantkit {__version__}. This page loads nothing from the network."
