"""How large a loss can still be: bounds from paired answers, or from two separate scores.

Paired answers give narrow bounds (`paired.py`). Score files without answers give wide ones: both
models saw the same documents, so treating their errors as independent overstates the uncertainty.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from quantkit import metrics
from quantkit.scoring.paired import ALPHA, MIN_DOCUMENTS, deviations, difference_interval
from quantkit.scoring.scorecard import Score

Interval = tuple[float, float]
WIDENED = 1.25
"""Old reports hold only the 95% interval of a perplexity. For more confidence its ends move as
Student's t does with one degree of freedom fewer than documents, and by this factor on top: where a
few documents hold most of the tokens, the effective number is smaller than reported.
"""
MOST_DEGREES = 1000
"""Student's t is within 0.3% of the normal distribution from here on, up to 99.9%."""
MOST_TIMES = 1_000_000
"""More than this many times the questions so far is out of reach."""


def of_difference(
    gained: int, lost: int, n_questions: int, confidence: float, times: float = 1.0
) -> Interval | None:
    """Bounds of a paired difference of accuracies; with `times` as many similar questions."""
    if gained < 0 or lost < 0 or n_questions <= 0 or gained + lost > n_questions:
        return None
    counts = (times * gained, times * lost, times * n_questions)
    low, high = difference_interval(*counts, confidence)
    return float(low), float(high)


def of_ratio(
    ratio: float,
    usual: Interval,
    intervals: Mapping[str, Sequence[float]],
    n_documents: int | None,
    confidence: float,
    times: float = 1.0,
) -> Interval | None:
    """Bounds of a paired ratio of perplexities, from the intervals in a report.

    Between two stored confidences the higher one counts, and beyond the highest there is none: a
    bootstrap's tails follow no formula. `usual` is the 95% interval, the only one in old reports.
    """
    low, high = usual
    if not (0 <= low <= ratio <= high < math.inf and ratio > 0):
        return None
    scale = 1.0
    if intervals:
        kept = sorted((float(at), ends) for at, ends in intervals.items())
        found = next((ends for at, ends in kept if at >= confidence - 1e-9), None)
        if found is None or len(found) != 2 or not 0 <= found[0] <= ratio <= found[1] < math.inf:
            return None
        low, high = found
    elif confidence <= 1 - ALPHA:
        # The tails of a bootstrap-t are longer, so this is a little too wide.
        scale = deviations(confidence) / deviations(1 - ALPHA)
    elif n_documents is None or n_documents < 2:
        return None
    else:
        degrees = n_documents - 1
        scale = WIDENED * student(confidence, degrees) / student(1 - ALPHA, degrees)
    middle, scale = math.log(ratio), scale / math.sqrt(times)
    ends = (middle + scale * (math.log(max(end, 1e-300)) - middle) for end in (low, high))
    lower, upper = (math.exp(min(end, 700.0)) for end in ends)
    return lower, upper


def of_value(
    score: Score, n_documents: int | None, confidence: float, times: float = 1.0
) -> Interval | None:
    """Bounds of a value by its standard error over documents; None without one."""
    if score.stderr is None or not math.isfinite(score.stderr) or score.stderr < 0:
        return None
    half = _times(n_documents, confidence) * score.stderr / math.sqrt(times)
    return score.value - half, score.value + half


def of_separate_accuracies(before: Score, after: Score, confidence: float) -> Interval | None:
    """Bounds of a difference of accuracies without paired answers; None for impossible counts.

    The wider of two: R. G. Newcombe's hybrid score interval of independent proportions (Statistics
    in Medicine 17 (1998) 873-890, method 10), and the standard errors of the scores.
    """
    if min(before.n, after.n) < 1 or not (0 <= before.value <= 1 and 0 <= after.value <= 1):
        return None
    difference = after.value - before.value
    (low, high), (least, most) = (_wilson(s.value, s.n, confidence) for s in (before, after))
    errors = math.hypot(before.stderr or 0.0, after.stderr or 0.0)
    half = deviations(confidence) * errors
    down = math.hypot(after.value - least, high - before.value)
    up = math.hypot(most - after.value, before.value - low)
    return difference - max(down, half), difference + max(up, half)


def of_separate_perplexities(
    before: Score, after: Score, n_documents: int | None, confidence: float
) -> Interval | None:
    """Bounds of a ratio of perplexities without paired answers; None without standard errors."""
    if not before.stderr or not after.stderr or before.value <= 0 or after.value <= 0:
        return None
    middle = math.log(after.value / before.value)
    errors = math.hypot(before.stderr / before.value, after.stderr / after.value)
    half = _times(n_documents, confidence) * errors
    return math.exp(middle - half), math.exp(min(middle + half, 700.0))


def documents_of(scores: Mapping[str, Score], key: str) -> int | None:
    """Number of documents of a per-token score, from a value of the same task that counts them."""
    task = key.rpartition("/")[0]
    counted = [
        score.n
        for name, score in scores.items()
        if name.rpartition("/")[0] == task and not metrics.of(name).is_per_token
    ]
    return min(counted, default=None)


def needed(n: int, is_decided: Callable[[float], bool]) -> int | None:
    """How many questions would decide; `is_decided` answers for a multiple of those so far."""
    few, many = n, 2 * n
    while not is_decided(many / n):
        few, many = many, 2 * many
        if many > MOST_TIMES * n:
            return None
    while many - few > max(1, few // 100):
        middle = (few + many) // 2
        few, many = (few, middle) if is_decided(middle / n) else (middle, many)
    return many


@lru_cache(maxsize=256)
def student(confidence: float, degrees: int) -> float:
    """How many standard errors an interval of this confidence extends to either side."""
    degrees = min(degrees, MOST_DEGREES)
    inner, outer = 0.0, 1.0
    while _within(outer, degrees) < confidence:
        inner, outer = outer, 2 * outer
    for _ in range(60):
        middle = (inner + outer) / 2
        inner, outer = (middle, outer) if _within(middle, degrees) < confidence else (inner, middle)
    return outer


def _within(t: float, degrees: int) -> float:
    """The share of Student's distribution between -t and t.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _times(n_documents: int | None, confidence: float) -> float:
    """With an unknown number of documents, the fewest that an interval needs are assumed."""
    n = MIN_DOCUMENTS if n_documents is None else n_documents
    return student(confidence, max(n - 1, 1))


def _wilson(share: float, n: int, confidence: float) -> Interval:
    z2 = deviations(confidence) ** 2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)
