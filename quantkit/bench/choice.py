"""Choose the setting to serve with: the highest throughput that meets a latency target."""

from collections.abc import Sequence

from quantkit.bench.record import Choice, Row, Target
from quantkit.bench.table import lengths


def choose(rows: Sequence[Row], target: Target | None) -> list[Choice]:
    """One choice per model and workload: throughputs of two workloads do not compare."""
    several = len({lengths(row) for row in rows}) > 1
    found = []
    for model, asked in dict.fromkeys((row.model, lengths(row)) for row in rows):
        some = [row for row in rows if (row.model, lengths(row)) == (model, asked)]
        one = _choice(model, some, target)
        found.append(one.model_copy(update={"workload": asked if several else None}))
    return found


def _choice(model: str, rows: Sequence[Row], target: Target | None) -> Choice:
    good = [row for row in rows if row.n_ok and (row.meets or target is None)]
    if not good:
        return Choice(model=model, setting=None, reason=_why_none(rows, target))
    best = max(good, key=lambda row: row.output_tokens_per_s.mean)
    n_settings = len({row.setting_name for row in rows})
    reason = f"{best.output_tokens_per_s.mean:,.0f} output tokens per second, the most"
    reason += f" of {n_settings} settings" if n_settings > 1 else ""
    reason += f" with {words(target)}" if target is not None else ""
    if best.n_failed:
        reason += f"; {best.n_failed} of {best.n_requests} requests failed"
    return Choice(
        model=model,
        setting=best.setting,
        load=best.load_name,
        output_tokens_per_s=best.output_tokens_per_s.mean,
        reason=reason,
    )


def _why_none(rows: Sequence[Row], target: Target | None) -> str:
    if target is None or not any(row.n_ok for row in rows):
        return "no request was answered"
    nearest = max(rows, key=lambda row: row.attained or 0)
    return (
        f"no setting has {words(target)}; the closest, {nearest.setting_name} at "
        f"{nearest.load_name}, reaches {nearest.attained or 0:.1%} of requests"
    )


def words(target: Target) -> str:
    """A target in a few words."""
    parts = []
    if target.ttft_s is not None:
        parts.append(f"first tokens within {_time(target.ttft_s)}")
    if target.tpot_s is not None:
        parts.append(f"{_time(target.tpot_s)} per token")
    return f"{' and '.join(parts)} for {100 * target.share:g}% of requests"


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"


def front(rows: Sequence[Row]) -> set[int]:
    """Indices of rows on the Pareto front of speed and throughput within their workload."""
    return {
        place
        for place, row in enumerate(rows)
        if row.e2e_s is not None and not any(_beats(other, row) for other in rows)
    }


def _beats(a: Row, b: Row) -> bool:
    if a.e2e_s is None or b.e2e_s is None or a.workload != b.workload:
        return False
    left = (a.e2e_s.p50, -a.output_tokens_per_s.mean)
    right = (b.e2e_s.p50, -b.output_tokens_per_s.mean)
    return left != right and left[0] <= right[0] and left[1] <= right[1]
