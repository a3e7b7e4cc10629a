"""Measurements as rows of text, shared by the terminal, the page and reports.

Terminals get one table per model, with short flag names, and at 80 columns only the key figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.bench.record import Bench, Choice, Distribution, Row
from quantkit.engine import label
from quantkit.storage import gib

UNKNOWN = "\N{EN DASH}"
WORDS = ("model", "setting", "load", "in/out")
"""Titles of columns that hold text."""
SHORT = {
    "max_num_seqs": "seqs",
    "max_num_batched_tokens": "batched",
    "kv_cache_dtype": "kv",
    "prefix_caching": "prefix",
    "chunked_prefill": "chunked",
    "gpu_memory_utilization": "memory",
    "tensor_parallel": "tp",
    "speculative": "draft",
}
_Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Table:
    """Titles and rows; empty if no column has anything to show."""

    titles: list[str]
    rows: list[list[str]]

    @property
    def words(self) -> list[int]:
        """Indices of columns that hold text."""
        return [place for place, title in enumerate(self.titles) if title in WORDS]


def figures(rows: Sequence[Row], narrow: bool = False, named: bool = False) -> Table:
    """Latency, throughput and failures; with `named`, also each row's model."""
    swept = any(row.setting for row in rows)
    ends = (("p99",) if swept else ("p50", "p99")) if narrow else ("p50", "p90", "p99")
    columns = _names(rows, named)
    if not narrow:
        columns.append(("requests/s", lambda row: number(row.requests_per_s.mean)))
    columns.append(("output\ntokens/s", tokens_per_s))
    heading = " / ".join(ends)
    columns.append((f"TTFT ms\n{heading}", lambda row: milliseconds(row.ttft_s, *ends)))
    columns.append((f"TPOT ms\n{heading}", lambda row: milliseconds(row.tpot_s, *ends)))
    if not narrow:
        columns.append((f"end to end ms\n{heading}", lambda row: milliseconds(row.e2e_s, *ends)))
    columns += [("failed", _failed), ("target\nmet", _target)]
    return _table(rows, columns if narrow else [*columns, *_COST])


def engine(rows: Sequence[Row], narrow: bool = False, named: bool = False) -> Table:
    """The engine's own figures; what is the same for a whole model is in `facts`."""
    swept = any(row.setting for row in rows)
    left_out = {"cold\nstart s", "weights", "queue\npeak", "cost/M\nall"} if swept else set()
    columns = [
        *(_ENGINE if swept or named else []),
        *_METRICS,
        *(_COST if narrow else []),
    ]
    if narrow:
        columns = [column for column in columns if column[0] not in left_out]
    if not any(_says(rows, cell) for _, cell in columns):
        return Table([], [])
    return _table(rows, [*_names(rows, named), *columns])


def facts(rows: Sequence[Row]) -> str:
    """Facts about one model's engine in one line; empty if settings change them."""
    if any(row.setting for row in rows):
        return ""
    row = rows[-1]
    parts = []
    if row.cold_start_s is not None:
        parts.append(f"ready after {number(row.cold_start_s)} s")
    if row.weight_bytes:
        parts.append(f"weights {gib(row.weight_bytes)}")
    peaks = [one.gpu_peak_bytes for one in rows if one.gpu_peak_bytes]
    if peaks:
        parts.append(f"GPU memory up to {gib(max(peaks))}")
    if row.kv_tokens:
        parts.append(f"KV cache of {row.kv_tokens:,} tokens")
    return ", ".join(parts)


def _names(rows: Sequence[Row], named: bool) -> list[_Column]:
    columns: list[_Column] = [("model", lambda row: row.model)] if named else []
    columns += [("load", lambda row: row.load_name), ("setting", setting)]
    if named or len({lengths(row) for row in rows}) > 1:
        columns.append(("in/out", lengths))
    return columns


def _table(rows: Sequence[Row], columns: Sequence[_Column]) -> Table:
    kept = [column for column in columns if _says(rows, column[1])]
    return Table([title for title, _ in kept], [[cell(row) for _, cell in kept] for row in rows])


def _says(rows: Sequence[Row], cell: Callable[[Row], str]) -> bool:
    return any(cell(row) not in ("", UNKNOWN) for row in rows)


def milliseconds(found: Distribution | None, *names: str) -> str:
    """Some percentiles, side by side."""
    if found is None:
        return UNKNOWN
    return " / ".join(number(1000 * getattr(found, name)) for name in names)


def number(value: float) -> str:
    """At least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tokens_per_s(row: Row) -> str:
    """With the spread of repetitions, if there are several."""
    rate = row.output_tokens_per_s
    if len(row.repetitions) < 2 or not rate.mean:
        return number(rate.mean)
    half = max(rate.high - rate.mean, rate.mean - rate.low) / rate.mean
    return f"{number(rate.mean)} ±{100 * half:.0f}%"


def lengths(row: Row) -> str:
    """Tokens of prompts and answers."""
    both = (row.workload.prompt_tokens, row.workload.output_tokens)
    if both == (None, None):
        return row.workload.name
    shown = "/".join(UNKNOWN if n is None else str(n) for n in both)
    return shown if row.workload.name == "fixed" else f"{row.workload.name} {shown}"


def setting(row: Row) -> str:
    """Swept flags by their short names."""
    return " ".join(f"{SHORT.get(name, name)}={value}" for name, value in row.setting.items())


def chosen(choice: Choice) -> str:
    """What to serve a model with, and why, in one sentence."""
    where = f"{choice.workload}: " if choice.workload else ""
    if choice.setting is None:
        return f"{where}no recommendation: {choice.reason}"
    named = " ".join(f"{k}={v}" for k, v in choice.setting.items()) or "the engine's defaults"
    return f"{where}{named}, up to {choice.load}: {choice.reason}"


def header(bench: Bench) -> str:
    """Engine, hardware and, if there is only one, the workload."""
    version = f" {bench.engine_version}" if bench.engine_version else ""
    asked = {lengths(row): row.workload for row in bench.rows}
    line = f"{label(bench.engine)}{version} on {bench.machine.name}"
    if len(asked) != 1:
        return line
    shown, workload = next(iter(asked.items()))
    if workload.name != "fixed":
        return f"{line}; {shown}"
    return f"{line}; {workload.prompt_tokens} tokens in, {workload.output_tokens} out"


def _failed(row: Row) -> str:
    return f"{row.n_failed} of {row.n_requests}" if row.n_failed else "0"


def _target(row: Row) -> str:
    if row.attained is None:
        return ""
    return f"{'yes' if row.meets else 'no'} {100 * row.attained:.3g}%"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _some(value: float | None) -> str:
    return "" if value is None else number(value)


def _metric(name: str, show: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: show(getattr(row.metrics, name)) if row.metrics else ""


_COST: list[_Column] = [
    ("cost/M\noutput", lambda row: _money(row.cost_per_million_output)),
    ("cost/M\nall", lambda row: _money(row.cost_per_million_total)),
]
_ENGINE: list[_Column] = [
    ("cold\nstart s", lambda row: _some(row.cold_start_s)),
    ("GPU\npeak", lambda row: gib(row.gpu_peak_bytes) if row.gpu_peak_bytes else ""),
    ("weights", lambda row: gib(row.weight_bytes) if row.weight_bytes else ""),
    ("KV\ntokens", lambda row: f"{row.kv_tokens:,}" if row.kv_tokens else ""),
]
_METRICS: list[_Column] = [
    ("KV\nused", _metric("kv_cache_peak", _share)),
    ("prefix\nhits", _metric("prefix_hit_rate", _share)),
    ("queue\npeak", _metric("queue_peak", _some)),
    ("drafts\naccepted", _metric("draft_acceptance", _share)),
    ("tokens/\nstep", _metric("tokens_per_step", _some)),
]
