"""Percentiles, rates, failures by kind, and target attainment from outcomes."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from quantkit.bench.record import Distribution, Rate, Repetition, Target
from quantkit.bench.request import Outcome


def percentile(ordered: Sequence[float], share: float) -> float:
    """Percentile of sorted values, linearly interpolated."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Iterable[float]) -> Distribution | None:
    """Distribution of values; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Distribution(
        n=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def repetition(outcomes: Sequence[Outcome], prompt_lengths: Sequence[int | None]) -> Repetition:
    """One pass; if the server does not count prompt tokens, the lengths sent are used."""
    good = [(o, n) for o, n in zip(outcomes, prompt_lengths, strict=True) if o.ok]
    start = min(outcome.due for outcome in outcomes)
    end = max(outcome.answer.ended for outcome in outcomes)
    return Repetition(
        seconds=max(end - start, 1e-9),
        n_ok=len(good),
        n_failed=len(outcomes) - len(good),
        prompt_tokens=sum(o.answer.n_prompt or sent or 0 for o, sent in good),
        output_tokens=sum(o.answer.n_output for o, _ in good),
    )


def rate(values: Sequence[float]) -> Rate:
    """Mean, minimum and maximum over repetitions."""
    return Rate(mean=math.fsum(values) / len(values), low=min(values), high=max(values))


def failures(outcomes: Iterable[Outcome]) -> tuple[dict[str, int], dict[str, str]]:
    """Count of each kind, and its first message."""
    counts: Counter[str] = Counter()
    words: dict[str, str] = {}
    for outcome in outcomes:
        if failure := outcome.answer.failure:
            counts[failure.kind] += 1
            words.setdefault(failure.kind, failure.words)
    return dict(counts.most_common()), words


def attained(outcomes: Sequence[Outcome], target: Target) -> float:
    """Share of requests that met a target. A failed one does not."""
    return sum(_met(outcome, target) for outcome in outcomes) / len(outcomes)


def _met(outcome: Outcome, target: Target) -> bool:
    if not outcome.ok:
        return False
    if target.ttft_s is not None and outcome.ttft_s > target.ttft_s:
        return False
    # A single token has no time between tokens.
    tpot = outcome.tpot_s
    return target.tpot_s is None or tpot is None or tpot <= target.tpot_s


def cost_per_million(tokens_per_s: float, gpu_hour: float, n_gpus: int) -> float | None:
    """Cost of a million tokens on GPUs rented by the hour."""
    if tokens_per_s <= 0:
        return None
    return gpu_hour * n_gpus / (tokens_per_s * 3600) * 1e6
