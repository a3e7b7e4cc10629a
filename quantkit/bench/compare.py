"""Compare two models under the same requests and arrivals: is one faster, or is it chance?

Every model gets the same prompts in the same order, at the same times if arrivals are timed. So the
n-th answers of two models form a pair, and the ratio of their times shows the effect of the model,
not of the prompt. Concurrent requests disturb each other, so neighbours are not independent: pairs
are averaged over blocks of the run, and Student's interval is over those means.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quantkit.bench.record import Comparison, Row
from quantkit.bench.request import Outcome

LEAST_BLOCKS, MOST_BLOCKS = 5, 20
LEAST_IN_BLOCK = 4
Z95 = 1.959964
METRICS: dict[str, Callable[["Sample"], float | None]] = {
    "time to first token": lambda one: one.ttft_s,
    "time per token": lambda one: one.tpot_s,
    "whole request": lambda one: one.e2e_s,
}


@dataclass(frozen=True)
class Sample:
    """Times of one request; None if it failed or has no such time."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def of(cls, outcome: Outcome) -> "Sample":
        if not outcome.ok:
            return cls()
        return cls(outcome.ttft_s, outcome.tpot_s, outcome.e2e_s)


Samples = Sequence[Sample]


def compare(rows: Sequence[Row], samples: Sequence[Samples]) -> Iterator[Comparison]:
    """Every model against the first, for equal requests and settings."""
    for place, (row, own) in enumerate(zip(rows, samples, strict=True)):
        first = next(i for i, other in enumerate(rows) if _asks_alike(other, row))
        if first == place or rows[first].model == row.model:
            continue
        base = samples[first]
        if len(base) != len(own):
            continue
        for metric, value in METRICS.items():
            pairs = [(value(a), value(b)) for a, b in zip(base, own, strict=True)]
            logs = [math.log(b / a) for a, b in pairs if a and b]
            yield _comparison(row, rows[first].model, metric, logs)


def _asks_alike(one: Row, other: Row) -> bool:
    return (one.setting, one.workload, one.load) == (other.setting, other.workload, other.load)


def _comparison(row: Row, against: str, metric: str, logs: Sequence[float]) -> Comparison:
    comparison = Comparison(
        model=row.model,
        against=against,
        setting=row.setting,
        load=row.load_name,
        metric=metric,
        n_pairs=len(logs),
        verdict="too few paired requests to compare",
    )
    n_blocks = min(MOST_BLOCKS, len(logs) // LEAST_IN_BLOCK)
    if n_blocks < LEAST_BLOCKS:
        return comparison
    means = block_means(logs, n_blocks)
    low, middle, high = (math.exp(value) for value in interval(means))
    if low <= 1 <= high:
        verdict = "no difference within the noise"
    else:
        verdict = "slower" if middle > 1 else "faster"
    return comparison.model_copy(
        update={"ratio": middle, "low": low, "high": high, "verdict": verdict}
    )


def block_means(values: Sequence[float], n_blocks: int) -> list[float]:
    """Means over blocks of a run, which differ in length by at most one value."""
    edges = [len(values) * n // n_blocks for n in range(n_blocks + 1)]
    blocks = [values[a:b] for a, b in pairwise(edges)]
    return [math.fsum(block) / len(block) for block in blocks]


def interval(means: Sequence[float]) -> tuple[float, float, float]:
    """Lower end, mean and upper end of Student's interval at 95%."""
    n = len(means)
    mean = math.fsum(means) / n
    variance = math.fsum((value - mean) ** 2 for value in means) / (n - 1)
    half = quantile(n - 1) * math.sqrt(variance / n)
    return mean - half, mean, mean + half


def quantile(freedom: int) -> float:
    """Student's quantile at 97.5%, by its expansion around the normal one; to 0.3% from 4 degrees
    on.
    """
    z = Z95
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def words(found: Comparison) -> str:
    """A comparison in one line."""
    if found.ratio is None or found.low is None or found.high is None:
        return f"{found.metric}: {found.verdict} ({found.n_pairs})"
    change, low, high = (100 * (value - 1) for value in (found.ratio, found.low, found.high))
    return (
        f"{found.metric}: {found.verdict}, {change:+.1f}% (95%: {low:+.1f} to {high:+.1f}%) of "
        f"{found.against}'s, {found.n_pairs} pairs"
    )
