"""Measurements as a page: what to serve with, latency against throughput, every figure."""

from collections.abc import Sequence

from markupsafe import Markup

from quantkit.bench import choice, compare, table
from quantkit.bench.record import Bench, Row
from quantkit.engine import label
from quantkit.page import lines, scatter
from quantkit.page.document import Section, document
from quantkit.page.parts import Fact, details, facts, notices
from quantkit.page.scale import Axis
from quantkit.page.table import Cell, Column
from quantkit.page.table import table as drawn_table

SEARCHABLE = 8


def render(bench: Bench) -> str:
    """The whole page; the same measurements give the same bytes."""
    sections = [
        Section("What to serve with", _choices(bench)),
        Section("Throughput against latency", _trade(bench)),
        Section("As the load grows", _by_users(bench)),
        Section("Every measurement", [_figures(bench), _engines(bench)]),
        Section("What did not run", _refusals(bench)),
        Section("How it was measured", [_how(bench)]),
    ]
    names = list(dict.fromkeys(row.model for row in bench.rows))
    return document(
        f"{names[0]}: speed" if len(names) == 1 else f"Speed of {len(names)} models",
        [section for section in sections if any(section.parts)],
        kind="Benchmark",
        lead=_lead(bench),
        top=[
            notices("Read this first", [*bench.notes, *_compared(bench)]),
            facts(_facts(bench)),
        ],
        footer=f"Written by quantkit {bench.versions.get('quantkit', '')}. Nothing on this page is "
        "loaded from elsewhere.",
    )


def _lead(bench: Bench) -> str:
    return f"{table.header(bench)}."


def _facts(bench: Bench) -> list[Fact]:
    good = [row for row in bench.rows if row.n_ok]
    if not good:
        return []
    most = max(good, key=lambda row: row.output_tokens_per_s.mean)
    found = [Fact(table.number(most.output_tokens_per_s.mean), "output tokens per second, at most")]
    first = [row.ttft_s.p50 for row in good if row.ttft_s]
    if first:
        found.append(Fact(f"{1000 * min(first):.3g} ms", "to the first token, at best (median)"))
    steps = [row.tpot_s.p50 for row in good if row.tpot_s]
    if steps:
        found.append(Fact(f"{1000 * min(steps):.3g} ms", "per token, at best (median)"))
    failed = sum(row.n_failed for row in bench.rows)
    found.append(
        Fact(f"{failed:,} of {sum(r.n_requests for r in bench.rows):,}", "requests failed")
    )
    return found


def _choices(bench: Bench) -> list[str | Markup]:
    if not bench.choices or (bench.target is None and not any(r.setting for r in bench.rows)):
        return []
    columns = [Column("Model"), Column("Setting"), Column("Load"), Column("Why")]
    several = any(one.workload for one in bench.choices)
    if several:
        columns.insert(1, Column("In/out"))
    rows: list[list[Cell | str | Markup]] = []
    for one in bench.choices:
        named = " ".join(f"{k}={v}" for k, v in (one.setting or {}).items()) or "default"
        chosen = "none" if one.setting is None else named
        asked = [one.workload or ""] if several else []
        rows.append([one.model, *asked, chosen, one.load or "", one.reason])
    return [drawn_table("Most tokens per second within the target", columns, rows)]


def _trade(bench: Bench) -> list[str | Markup]:
    """One chart per workload: request latency against server throughput."""
    parts: list[str | Markup] = []
    best = choice.front(bench.rows)
    for workload in dict.fromkeys(table.lengths(row) for row in bench.rows):
        points = [
            scatter.Point(
                _name(row),
                1000 * row.e2e_s.p50,
                row.output_tokens_per_s.mean,
                group=row.model,
                front=place in best,
            )
            for place, row in enumerate(bench.rows)
            if row.e2e_s is not None and table.lengths(row) == workload
        ]
        if len(points) > 1:
            parts.append(
                scatter.scatter(
                    f"Output tokens per second against request time, {workload} tokens",
                    points,
                    Axis("median time of a request, ms"),
                    Axis("output tokens per second"),
                    front="no other is faster with more tokens",
                )
            )
    return parts


def _name(row: Row) -> str:
    parts = [row.load_name, *([row.setting_name] if row.setting else [])]
    return ", ".join(parts)


def _by_users(bench: Bench) -> list[str | Markup]:
    parts: list[str | Markup] = []
    for workload in dict.fromkeys(table.lengths(row) for row in bench.rows):
        rows = [row for row in bench.rows if table.lengths(row) == workload]
        for axis, kind in (("concurrency", "users"), ("rate", "requests per second, asked for")):
            parts += _curves(rows, axis, kind, workload)
    return parts


def _curves(rows: Sequence[Row], axis: str, kind: str, workload: str) -> list[Markup]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if getattr(row.load, axis) is not None and row.ttft_s is not None:
            found.setdefault(f"{row.model} {table.UNKNOWN} {row.setting_name}", []).append(row)
    kept = {name: some for name, some in found.items() if len(some) > 1}
    if not kept:
        return []
    if all(name.endswith(" default") for name in kept):
        kept = {some[0].model: some for some in kept.values()}

    def series(value: str) -> list[lines.Series]:
        return [
            lines.Series(
                name,
                sorted((float(getattr(row.load, axis)), _figure(row, value)) for row in some),
            )
            for name, some in kept.items()
        ]

    x = Axis(kind, log=True, digits=0 if axis == "concurrency" else None)
    return [
        lines.lines(
            f"Output tokens per second, {workload} tokens",
            series("rate"),
            x,
            Axis("output tokens per second"),
        ),
        lines.lines(
            f"Time to first token, {workload} tokens",
            series("ttft"),
            x,
            Axis("99th percentile, ms"),
        ),
    ]


def _figure(row: Row, value: str) -> float:
    if value == "rate":
        return row.output_tokens_per_s.mean
    return 1000 * row.ttft_s.p99 if row.ttft_s else float("nan")


def _figures(bench: Bench) -> Markup:
    return _plain("Latencies and throughput", table.figures(bench.rows, named=True))


def _engines(bench: Bench) -> Markup:
    found = table.engine(bench.rows, named=True)
    return _plain("The engine's own metrics", found) if found.rows else Markup()


def _plain(caption: str, found: table.Table) -> Markup:
    columns = []
    for title in found.titles:
        name, _, note = title.partition("\n")
        shown = name[:1].upper() + name[1:]
        columns.append(Column(shown, numeric=title not in table.WORDS, note=note))
    cells = [[Cell(text, _sorting(text)) for text in row] for row in found.rows]
    many = len(found.rows) > SEARCHABLE
    return drawn_table(caption, columns, cells, searchable=many, wide=True)


def _sorting(text: str) -> float | None:
    try:
        return float(text.split(" ")[0].rstrip("%").replace(",", ""))
    except ValueError:
        return None


def _refusals(bench: Bench) -> list[str | Markup]:
    if not bench.refusals:
        return []
    columns = [Column("Model"), Column("Setting"), Column("Reason")]
    rows = [
        [one.model, " ".join(f"{k}={v}" for k, v in one.setting.items()) or "default", one.reason]
        for one in bench.refusals
    ]
    return [drawn_table("Engines that did not start", columns, rows)]


def _how(bench: Bench) -> Markup:
    rows = {
        "Engine": f"{label(bench.engine)} {bench.engine_version or ''}".strip(),
        "Hardware": bench.machine.name,
        "Latencies": "from when a request was due, so that waiting for a slow server counts",
        "Throughput": "of requests that were answered in full, the mean of repetitions",
        **{name: str(value) for name, value in bench.options.items() if value not in (None, [])},
        "When": bench.created,
    }
    if bench.gpu_hour:
        rows["Price"] = f"{bench.gpu_hour:g} per GPU and hour, {bench.n_gpus} GPU"
    return details(rows)


def _compared(bench: Bench) -> list[str]:
    """Whether models differ, request by request."""
    return [f"{one.model}, {one.load}: {compare.words(one)}." for one in bench.comparisons]
