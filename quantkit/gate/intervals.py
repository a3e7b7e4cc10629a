"""Intervals of a change, from what a report keeps of paired answers."""

import math
from collections.abc import Callable

from quantkit.report.document import Comparison
from quantkit.score.paired import ALPHA, deviations, difference_interval

Interval = tuple[float, float]
MOST_TIMES = 1_000_000
"""So many times the questions asked so far are out of anybody's reach."""


def of_change(comparison: Comparison, confidence: float, times: float = 1.0) -> Interval | None:
    """The interval of a difference of accuracies or a ratio of perplexities.

    With `times` as many questions, if all goes on as it began. None where the report's own interval
    is missing or makes no sense.
    """
    if comparison.n_questions is not None:
        return _of_difference(comparison, confidence, times)
    return _of_ratio(comparison, confidence, times)


def _of_difference(comparison: Comparison, confidence: float, times: float) -> Interval | None:
    n, gained, lost = comparison.n_questions, comparison.gained, comparison.lost
    if n is None or gained is None or lost is None:
        return None
    if gained < 0 or lost < 0 or n <= 0 or gained + lost > n:
        return None
    low, high = difference_interval(times * gained, times * lost, times * n, confidence)
    return float(low), float(high)


def _of_ratio(comparison: Comparison, confidence: float, times: float) -> Interval | None:
    """The 95% interval of the ratio's logarithm, made wider or narrower on either side."""
    ratio, low, high = comparison.ratio, comparison.low, comparison.high
    if ratio is None or low is None or high is None:
        return None
    if not (0 <= low <= ratio <= high < math.inf and ratio > 0):
        return None
    scale = deviations(confidence) / deviations(1 - ALPHA) / math.sqrt(times)
    middle = math.log(ratio)
    ends = (middle + scale * (math.log(max(end, 1e-300)) - middle) for end in (low, high))
    lower, upper = (math.exp(min(end, 700.0)) for end in ends)
    return lower, upper


def n_of(comparison: Comparison) -> int | None:
    """Questions or documents that were compared."""
    return comparison.n_questions or comparison.n_documents


def needed(n: int, is_told: Callable[[float], bool]) -> int | None:
    """How many questions would tell, where `is_told` answers for a multiple of those so far."""
    few, many = n, 2 * n
    while not is_told(many / n):
        few, many = many, 2 * many
        if many > MOST_TIMES * n:
            return None
    while many - few > max(1, few // 100):
        middle = (few + many) // 2
        few, many = (few, middle) if is_told(middle / n) else (middle, many)
    return many
