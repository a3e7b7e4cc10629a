"""Measurements as rows of text, shared by the terminal, Markdown and reports."""

from collections.abc import Callable, Sequence

from quantkit.bench.record import Bench, Choice, Distribution, Row
from quantkit.storage import gib

UNKNOWN = "–"  # noqa: RUF001
WORDS = ("model", "setting", "load", "in/out")
"""Titles of columns that hold text."""
_Column = tuple[str, Callable[[Row], str]]


def titles_and_rows(bench: Bench, narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """What was measured; columns that say nothing are left out."""
    columns = [column for column in _columns(narrow) if _says(bench.rows, column[1])]
    shown = [[cell(row) for _, cell in columns] for row in bench.rows]
    titles = [title if narrow else title.replace("\n", " ") for title, _ in columns]
    return titles, shown


def engine_rows(bench: Bench, narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """What is known of engines besides speed, once for every load that changes it."""
    known = [*_ENGINE, *(_COST if narrow else [])]
    columns = [column for column in known if _says(bench.rows, column[1])]
    if all(column in _NAMES for column in columns):
        return [], []
    shown = [[cell(row) for _, cell in columns] for row in bench.rows]
    titles = [title if narrow else title.replace("\n", " ") for title, _ in columns]
    return titles, shown


def _says(rows: Sequence[Row], cell: Callable[[Row], str]) -> bool:
    return any(cell(row) not in ("", UNKNOWN) for row in rows)


def milliseconds(found: Distribution | None, *names: str) -> str:
    """Some percentiles, side by side."""
    if found is None:
        return UNKNOWN
    return " / ".join(_ms(getattr(found, name)) for name in names)


def _ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float | None) -> str:
    """Three digits at least."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tokens_per_s(row: Row) -> str:
    """With the spread of repetitions, where there are several."""
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


def chosen(choice: Choice) -> str:
    """What to serve a model with, and why, in one sentence."""
    if choice.setting is None:
        return f"nothing that was tried: {choice.reason}"
    named = " ".join(f"{k}={v}" for k, v in choice.setting.items()) or "the engine's defaults"
    return f"{named}, up to {choice.load}: {choice.reason}"


def _setting(row: Row) -> str:
    return row.setting_name if row.setting else ""


def _failed(row: Row) -> str:
    return f"{row.n_failed} of {row.n_requests}" if row.n_failed else "0"


def _target(row: Row) -> str:
    if row.attained is None:
        return ""
    return f"{row.attained:.1%} {'yes' if row.meets else 'no'}"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.3g}"


def _columns(narrow: bool) -> list[_Column]:
    ends = ("p50", "p99") if narrow else ("p50", "p90", "p99")
    told = " / ".join(ends)
    columns: list[_Column] = [
        ("model", lambda row: row.model),
        ("setting", _setting),
        ("load", lambda row: row.load_name),
        ("in/out", lengths),
    ]
    if not narrow:
        columns.append(("requests/s", lambda row: number(row.requests_per_s.mean)))
    columns.append(("output\ntokens/s", tokens_per_s))
    columns.append((f"TTFT ms\n{told}", lambda row: milliseconds(row.ttft_s, *ends)))
    columns.append((f"TPOT ms\n{told}", lambda row: milliseconds(row.tpot_s, *ends)))
    if not narrow:
        columns.append((f"end to end ms\n{told}", lambda row: milliseconds(row.e2e_s, *ends)))
    columns.append(("failed", _failed))
    columns.append(("target\nmet", _target))
    return [*columns, *([] if narrow else _COST)]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _metric(name: str, show: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: show(getattr(row.metrics, name)) if row.metrics else ""


def _some(value: float | None) -> str:
    return "" if value is None else number(value)


_COST: list[_Column] = [
    ("cost/M\noutput", lambda row: _money(row.cost_per_million_output)),
    ("cost/M\nall", lambda row: _money(row.cost_per_million_total)),
]
_NAMES: list[_Column] = [
    ("model", lambda row: row.model),
    ("setting", _setting),
    ("load", lambda row: row.load_name),
]
_ENGINE: list[_Column] = [
    *_NAMES,
    ("cold\nstart s", lambda row: _some(row.cold_start_s)),
    ("GPU\npeak", lambda row: gib(row.gpu_peak_bytes) if row.gpu_peak_bytes else ""),
    ("weights", lambda row: gib(row.weight_bytes) if row.weight_bytes else ""),
    ("KV\ntokens", lambda row: f"{row.kv_tokens:,}" if row.kv_tokens else ""),
    ("KV\nused", _metric("kv_cache_peak", _share)),
    ("prefix\nhits", _metric("prefix_hit_rate", _share)),
    ("queue\npeak", _metric("queue_peak", _some)),
    ("drafts\naccepted", _metric("draft_acceptance", _share)),
    ("tokens/\nstep", _metric("tokens_per_step", _some)),
]
