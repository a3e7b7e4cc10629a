"""Is a difference between a source model and a quantised candidate real, or chance?

Both models answer the same questions and read the same documents, so differences are paired: what
both get wrong says nothing, and intervals are far narrower than those of two separate scores.
Functions take plain arrays; to compare a group of subjects, pass its part of them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quantkit.errors import ScoreError

Floats = NDArray[np.float64]

ALPHA = 0.05
DRAWS = 10_000
CONFIDENCES = (0.6, 0.8, 0.9, 1 - ALPHA, 0.975, 0.98, 0.99, 0.995, 0.999)
"""Confidences of the stored intervals of a perplexity change: a bootstrap's tails follow no
formula.
"""
MIN_DOCUMENTS = 5  # fewer have no spread to speak of
MOST_KEPT = 1 << 23
"""Counts that are cached for the next candidate: 64 MiB."""
PICKS_AT_ONCE = 1 << 20  # resampled documents in memory: about 32 MB
MOST = 100.0  # a draw of one document over and over has no spread; no quantile lies beyond this


@dataclass(frozen=True)
class AccuracyChange:
    """Candidate minus source, as a fraction of all questions."""

    n_questions: int
    gained: int
    """Questions that only the candidate gets right."""
    lost: int
    """Questions that only the source gets right."""
    difference: float
    low: float
    high: float
    p_value: float

    @property
    def discordant(self) -> float:
        """The share of questions that one model gets right and the other wrong."""
        return (self.gained + self.lost) / self.n_questions

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PerplexityChange:
    """Perplexity of the candidate over that of the source."""

    n_documents: int
    n_tokens: int
    ratio: float
    low: float | None
    """None with too few documents for an interval; so is `high`."""
    high: float | None
    p_value: float
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """Low and high by confidence, for all of `CONFIDENCES`; empty without an interval."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_accuracies(source: ArrayLike, candidates: Sequence[ArrayLike]) -> list[AccuracyChange]:
    """Compare models with their source on the same questions: right is 1, wrong is 0.

    All intervals are computed together, which is faster.
    """
    gained, lost = [], []
    for candidate in candidates:
        before, after = _aligned("questions", source, candidate)
        if not (((before == 0) | (before == 1)) & ((after == 0) | (after == 1))).all():
            raise ScoreError("an answer is right (1) or wrong (0); compare answers, not averages")
        gained.append(int((after > before).sum()))
        lost.append(int((after < before).sum()))
    n = len(np.asarray(source))
    ends = difference_interval(gained, lost, n)
    return [
        AccuracyChange(
            n, more, less, (more - less) / n, float(low), float(high), mcnemar(more, less)
        )
        for more, less, low, high in zip(gained, lost, *ends, strict=True)
    ]


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value: without a difference, gains and losses are coin tosses."""
    n, fewer = gained + lost, min(gained, lost)
    k = np.arange(1, fewer + 1)
    logs = np.concatenate(([0.0], np.cumsum(np.log((n - k + 1) / k)))) - n * math.log(2)
    return min(1.0, 2 * float(np.exp(logs).sum()))


def difference_interval(
    gained: ArrayLike, lost: ArrayLike, n_questions: ArrayLike, confidence: float = 1 - ALPHA
) -> tuple[Floats, Floats]:
    """Score interval of a paired difference, 95% by default; arrays give arrays.

    T. Tango, Statistics in Medicine 17 (1998) 891-908: every difference that a score test does not
    reject; at zero that is McNemar's test without correction. Among the intervals that Fagerland,
    Lydersen and Laake (Statistics in Medicine 33 (2014) 2850-2875) recommend. The usual estimate +-
    1.96 standard errors has no width when no pair differs; this one has.
    """
    counts = (np.asarray(count, np.float64) for count in (gained, lost, n_questions))
    gains, losses, n = np.broadcast_arrays(*counts)
    estimate = (gains - losses) / n
    z = deviations(confidence)

    def rejected(delta: Floats) -> Any:
        # The most likely share of losses if the difference were delta, then the test itself.
        b = (2 * n - gains + losses) * delta - gains - losses
        root = np.sqrt(np.maximum(b * b + 8 * n * losses * delta * (1 - delta), 0))
        variance = n * ((root - b) / (2 * n) + delta * (1 - delta))
        return (gains - losses - n * delta) ** 2 > z * z * variance

    def end(outside: float) -> Floats:
        inner, outer = estimate, np.full_like(estimate, outside)
        for _ in range(50):
            middle = (inner + outer) / 2
            out = rejected(middle)
            inner, outer = np.where(out, inner, middle), np.where(out, middle, outer)
        return inner

    return end(-1.0), end(1.0)


def deviations(confidence: float) -> float:
    """How many standard deviations an interval of this confidence extends to either side."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def questions_needed(discordant: float, half_width: float) -> int:
    """How many questions give an interval of at most +- `half_width` (0.01: one point).

    For the observed share of discordant pairs, and gains as frequent as losses: the widest case.
    """
    if not (0 <= discordant <= 1 and 0 < half_width < 1):
        raise ScoreError("a share must be from 0 to 1, a half-width above 0 and below 1")

    def enough(n: int) -> bool:
        low, high = difference_interval(discordant * n / 2, discordant * n / 2, n)
        return bool(high - low <= 2 * half_width)

    few, many = 0, 1
    while not enough(many):
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def compare_perplexity(
    source_nll: ArrayLike,
    candidate_nll: ArrayLike,
    tokens: ArrayLike,
    draws: int = DRAWS,
    seed: int = 0,
) -> PerplexityChange:
    """Compare two models by the negative log-likelihood of each document and its tokens.

    The change of the mean loss per token is a ratio of sums over documents. Its interval and its
    p-value come from a bootstrap-t over documents (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, chapter 12), because percentiles of a plain bootstrap are far too narrow with
    20 documents. Where a few long documents hold most of the tokens even bootstrap-t claims too
    much; hence the jackknife's standard error, and a second opinion from Student's t with as many
    degrees of freedom as there are documents in effect. The more cautious of the two counts.
    """
    before, after, length = _aligned("documents", source_nll, candidate_nll, tokens)
    if (length < 0).any() or not length.any():
        raise ScoreError("documents are compared by their tokens; give the token count of each")
    # The same draws for any order of documents and whichever model is called the source.
    order = np.lexsort((before + after, np.abs(after - before), length))
    order = order[length[order] > 0]
    change, length = (after - before)[order], length[order]
    n, total = len(length), float(length.sum())
    mean = float(change.sum()) / total
    ratio = math.exp(min(mean, 700.0))
    if not change.any():
        same = {f"{confidence:g}": [1.0, 1.0] for confidence in CONFIDENCES}
        return PerplexityChange(n, int(total), 1.0, 1.0, 1.0, 1.0, same)
    if n < MIN_DOCUMENTS:
        return PerplexityChange(n, int(total), ratio, None, None, 1.0)
    residuals = change - mean * length
    without_one = residuals / (total - length)
    error = math.sqrt((n - 1) / n * float((without_one**2).sum()))
    observed = float(np.clip(_over(np.float64(mean), np.float64(error)), -MOST, MOST))
    resampled, rng = _bootstrap_t(residuals, length, draws, seed)
    in_effect = total**2 / float((length**2).sum())
    student = np.abs(rng.standard_t(max(in_effect - 1, 1.0), draws))

    # All at once: one by one, quantiles are most of the work.
    confidences = np.array(CONFIDENCES)
    tail = (1 - confidences) / 2
    least, most = np.quantile(resampled, (tail, 1 - tail))
    enough = np.quantile(student, confidences)
    furthest = np.stack([np.maximum(most, enough), np.minimum(least, -enough)], 1)
    ends = [
        [math.exp(min(mean - error * times, 700.0)) for times in row] for row in furthest.tolist()
    ]
    intervals = {f"{c:g}": pair for c, pair in zip(CONFIDENCES, ends, strict=True)}
    low, high = intervals[f"{1 - ALPHA:g}"]
    tails = [1 + int((side * resampled >= side * observed).sum()) for side in (1, -1)]
    beyond = max(2 * min(tails), 1 + int((student >= abs(observed)).sum()))
    return PerplexityChange(
        n_documents=n,
        n_tokens=int(total),
        ratio=ratio,
        low=low,
        high=high,
        p_value=min(1.0, beyond / (draws + 1)),
        intervals=intervals,
    )


def _bootstrap_t(
    residuals: Floats, length: Floats, draws: int, seed: int
) -> tuple[Floats, np.random.Generator]:
    """Deviations of resampled means from the mean, each in its own standard errors.

    Also the generator, which continues from there.
    """
    n = len(length)
    columns = np.stack((residuals, length, residuals**2, residuals * length, length**2), axis=1)
    rng = np.random.default_rng(seed)
    parts: Iterable[Floats]
    if n * draws <= MOST_KEPT:  # the same for every candidate
        parts, state = _kept_picks(n, draws, seed)
        rng.bit_generator.state = state
    else:
        parts = _picks(n, draws, rng)
    r, t, rr, rt, tt = np.concatenate([counts @ columns for counts in parts]).T
    shift = r / t
    squares = np.maximum(rr - 2 * shift * rt + shift**2 * tt, 0)
    error = np.sqrt(n / (n - 1) * squares) / t
    return np.clip(_over(shift, error), -MOST, MOST), rng


def _picks(n: int, draws: int, rng: np.random.Generator) -> Iterable[Floats]:
    """How often each of `n` documents is picked, draw by draw, some thousands at a time."""
    rows = max(1, PICKS_AT_ONCE // n)
    for start in range(0, draws, rows):
        size = min(rows, draws - start)
        picks = rng.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(picks.ravel(), minlength=size * n)
        yield counts.reshape(size, n).astype(np.float64)


@lru_cache(maxsize=2)
def _kept_picks(n: int, draws: int, seed: int) -> tuple[list[Floats], Any]:
    rng = np.random.default_rng(seed)
    return list(_picks(n, draws, rng)), rng.bit_generator.state


def _over(value: Any, error: Any) -> Any:
    """A value in standard errors; without any error, the largest possible."""
    return np.where(error > 0, value / np.where(error > 0, error, 1), np.sign(value) * MOST)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of several candidates, adjusted so that all together err in at most 5% of cases.

    S. Holm, Scandinavian Journal of Statistics 6 (1979) 65-70; holds for dependent tests too.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _aligned(what: str, *vectors: ArrayLike) -> list[Floats]:
    arrays = [np.asarray(vector, np.float64) for vector in vectors]
    if any(array.ndim != 1 or array.shape != arrays[0].shape for array in arrays):
        raise ScoreError(
            f"the models were not scored on the same {what}; score them with the same settings"
        )
    if not arrays[0].size or not all(np.isfinite(array).all() for array in arrays):
        raise ScoreError(f"a comparison needs {what}, with a finite score for each")
    return arrays
