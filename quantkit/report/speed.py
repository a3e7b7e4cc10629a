"""Serving speed next to quality: measurements of `quantkit bench` in a report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quantkit.bench import table as bench_table
from quantkit.engine import label
from quantkit.page.scale import Axis
from quantkit.page.scatter import Point, scatter
from quantkit.page.table import Cell, Column, table
from quantkit.report.document import Document, Speed
from quantkit.storage import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from quantkit.bench.record import Bench, Row
    from quantkit.report.comparison import Report

TITLES = ("model", "load", "in/out", "tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
SEARCHABLE = 8


def joined(report: Report, benches: Sequence[Bench]) -> Report:
    """A report with the speeds of its models; those of other models are only mentioned."""
    names = {card.digest: card.name for card in (report.baseline, *report.candidates)}
    found: list[Speed] = []
    strangers: dict[str, None] = {}
    for bench in benches:
        for row in bench.rows:
            named = row.model if row.model in names.values() else None
            known = names.get(row.digest) if row.digest else named
            if known is None:
                strangers[row.model] = None
            else:
                found.append(_speed(known, row, bench))
    notes = [
        f"the speed of {name} was measured, but it is not one of the models that were scored"
        for name in strangers
    ]
    order = [card.name for card in (report.baseline, *report.candidates)]
    found.sort(key=lambda one: order.index(one.model))  # stable: loads keep their order
    return replace(report, speed=tuple(found), notes=(*report.notes, *notes))


def _speed(name: str, row: Row, bench: Bench) -> Speed:
    return Speed(
        model=name,
        engine=bench.engine,
        engine_version=bench.engine_version,
        hardware=bench.machine.name,
        setting=row.setting,
        load=row.load_name,
        workload=bench_table.lengths(row),
        n_requests=row.n_requests,
        n_failed=row.n_failed,
        requests_per_s=row.requests_per_s.mean,
        output_tokens_per_s=row.output_tokens_per_s.mean,
        ttft_p50_s=row.ttft_s.p50 if row.ttft_s else None,
        ttft_p99_s=row.ttft_s.p99 if row.ttft_s else None,
        tpot_p50_s=row.tpot_s.p50 if row.tpot_s else None,
        tpot_p99_s=row.tpot_s.p99 if row.tpot_s else None,
        e2e_p50_s=row.e2e_s.p50 if row.e2e_s else None,
        e2e_p99_s=row.e2e_s.p99 if row.e2e_s else None,
        cold_start_s=row.cold_start_s,
        gpu_peak_bytes=row.gpu_peak_bytes,
        kv_tokens=row.kv_tokens,
        cost_per_million_output=row.cost_per_million_output,
    )


def rows(speeds: Sequence[Speed]) -> list[list[str]]:
    """As text, for Markdown."""
    return [
        [
            _full_name(one),
            one.load,
            one.workload,
            bench_table.number(one.output_tokens_per_s) + _failed(one),
            *map(_ms, (one.ttft_p50_s, one.ttft_p99_s, one.tpot_p50_s, one.tpot_p99_s)),
        ]
        for one in speeds
    ]


def how(speeds: Sequence[Speed]) -> str:
    """How they were measured, in a sentence."""
    where = dict.fromkeys(
        f"{label(one.engine)} {one.engine_version or ''}".strip() + f" on {one.hardware}"
        for one in speeds
    )
    return (
        f"Measured with quantkit bench, {'; '.join(where)}. Times in milliseconds, from when a "
        "request was due; tokens are those of answers."
    )


def _full_name(one: Speed) -> str:
    flags = " ".join(f"{name}={value}" for name, value in one.setting.items())
    return f"{one.model} ({flags})" if flags else one.model


def _failed(one: Speed) -> str:
    return f" ({one.n_failed} of {one.n_requests} failed)" if one.n_failed else ""


def _ms(seconds: float | None) -> str:
    return bench_table.UNKNOWN if seconds is None else bench_table.number(1000 * seconds)


def parts(report: Document) -> list[str | Markup]:
    """For the page: a table, and quality against speed at the most common load."""
    if not report.speed:
        return []
    columns = [
        Column("Model"),
        Column("Load"),
        Column("Tokens", note="prompt/answer"),
        Column("Tokens per second", numeric=True, note="of answers"),
        Column("First token", numeric=True, note="ms, p50"),
        Column("First token", numeric=True, note="ms, p99"),
        Column("Each token", numeric=True, note="ms, p50"),
        Column("Each token", numeric=True, note="ms, p99"),
        Column("GPU memory", numeric=True, note="peak"),
        Column("KV cache", numeric=True, note="tokens"),
        Column("Failed", numeric=True),
        Column("Cost", numeric=True, note="per million tokens"),
    ]
    shown = [_cells(one) for one in report.speed]
    many = len(shown) > SEARCHABLE
    drawn = table("Measured speeds", columns, shown, searchable=many, wide=True)
    return [how(report.speed), drawn, *_against_quality(report)]


def _cells(one: Speed) -> list[Cell | str | Markup]:
    times = (one.ttft_p50_s, one.ttft_p99_s, one.tpot_p50_s, one.tpot_p99_s)
    failed = f"{one.n_failed} of {one.n_requests}" if one.n_failed else "0"
    memory, cost = one.gpu_peak_bytes, one.cost_per_million_output
    return [
        _full_name(one),
        one.load,
        one.workload,
        Cell(bench_table.number(one.output_tokens_per_s), one.output_tokens_per_s),
        *(Cell(_ms(seconds), seconds) for seconds in times),
        Cell(gib(memory) if memory else "", memory),
        Cell(f"{one.kv_tokens:,}" if one.kv_tokens else "", one.kv_tokens),
        Cell(failed, one.n_failed, "bad" if one.n_failed else ""),
        Cell("" if cost is None else bench_table.number(cost), cost),
    ]


def _against_quality(report: Document) -> list[Markup]:
    if report.headline is None:
        return []
    by_case: dict[tuple[str, str], list[Speed]] = {}
    for one in report.speed:
        by_case.setdefault((one.load, one.workload), []).append(one)
    (load, workload), most = max(by_case.items(), key=lambda item: len({s.model for s in item[1]}))
    entries = {entry.name: entry for entry in (report.baseline, *report.candidates)}
    points = [
        Point(_full_name(one), one.output_tokens_per_s, entries[one.model].scores[headline].value)
        for one in most
        if (headline := report.headline) in entries[one.model].scores
    ]
    if len(points) < 2:
        return []
    return [
        scatter(
            f"{report.headline} against speed, {load}, {workload} tokens",
            points,
            Axis("output tokens per second"),
            Axis(report.headline),
        )
    ]
