"""The result of a paired comparison in one sentence."""

import math
from dataclasses import dataclass

from quantkit import metrics
from quantkit.scoring.paired import ALPHA, AccuracyChange, PerplexityChange


@dataclass(frozen=True)
class _Scale:
    """How a change is worded."""

    worse: int
    """The sign of a loss."""
    unit: str
    end_unit: str
    """The unit again, after the ends of an interval."""
    decimals: int
    noun: str
    useful: float
    """An interval that allows a larger loss than this settles nothing."""


POINTS = _Scale(worse=-1, unit=" points", end_unit="", decimals=1, noun="questions", useful=5.0)
PERCENT = _Scale(worse=1, unit="%", end_unit="%", decimals=2, noun="documents", useful=2.0)
FEWEST_DOCUMENTS = 20
"""Where intervals of a perplexity were found to hold (docs/design.md)."""
MOST_DECIMALS = 6
BROKEN = 100  # a ratio of perplexities beyond which digits mean nothing


def verdict(change: AccuracyChange | PerplexityChange, adjusted_p: float | None = None) -> str:
    """The change, its interval, and the conclusion; `adjusted_p` is the p-value after `holm`.

    A loss or gain is real if the p-value says so. The interval is that of this candidate alone, so
    among many candidates it may exclude zero while the adjusted p-value does not.
    """
    p = change.p_value if adjusted_p is None else adjusted_p
    chance = f"({'' if adjusted_p is None else 'adjusted '}{_chance(p)})"
    if isinstance(change, AccuracyChange):
        low, high, shift = (100 * value for value in (change.low, change.high, change.difference))
        amount = None if change.discordant else "right and wrong on the same questions"
        return _sentence(POINTS, change.n_questions, shift, (low, high), p < ALPHA, chance, amount)
    if change.low == change.high == 1:
        return f"the same on all {change.n_documents:,} documents: no loss"
    if change.ratio > BROKEN:
        return f"more than {BROKEN} times as high: a broken model"
    shift = 100 * (change.ratio - 1)
    if change.low is None or change.high is None or change.high > BROKEN:
        amount = _amount(PERCENT, shift, PERCENT.decimals)
        return f"{amount}: too few documents ({change.n_documents}) to tell"
    low, high = 100 * (change.low - 1), 100 * (change.high - 1)
    if change.n_documents < FEWEST_DOCUMENTS:
        amount = _amount(PERCENT, shift, _decimals(PERCENT, low, high))
        few = f"too few documents ({change.n_documents}) to tell"
        return f"{amount}, 95% interval {_interval(PERCENT, low, high)}: {few}"
    return _sentence(PERCENT, change.n_documents, shift, (low, high), p < ALPHA, chance)


def percent_interval(low: float, high: float) -> str:
    """The ends of a ratio's interval as changes in per cent, as in sentences."""
    return _interval(PERCENT, 100 * (low - 1), 100 * (high - 1))


def points_interval(low: float, high: float) -> str:
    """The ends of a difference's interval in points, as in sentences."""
    return _interval(POINTS, 100 * low, 100 * high)


def most_points(low: float) -> str:
    """The largest drop that an interval leaves open, rounded as its end is."""
    return f"{-_outward(100 * low, -1, POINTS.decimals):.1f}"


def _interval(scale: _Scale, low: float, high: float) -> str:
    decimals = _decimals(scale, low, high)
    ends = _outward(low, -1, decimals), _outward(high, 1, decimals)
    return " to ".join(f"{end:+,.{decimals}f}{scale.end_unit}" for end in ends)


def _sentence(
    scale: _Scale,
    n: int,
    shift: float,
    ends: tuple[float, float],
    is_real: bool,
    chance: str,
    amount: str | None = None,
) -> str:
    low, high = ends
    decimals = _decimals(scale, low, high)
    shown = _outward(low, -1, decimals), _outward(high, 1, decimals)
    interval = _interval(scale, low, high)
    worst = max(0.0, -shown[0] if scale.worse < 0 else shown[1])
    loss = f"{worst:,.{decimals}f}{scale.unit}"
    limit = f"a loss above {loss} is ruled out"
    if worst > scale.useful:
        limit = f"a loss of up to {loss} cannot be ruled out"
    kind = "loss" if shift * scale.worse > 0 else "gain"
    if low > 0 or high < 0:
        tail = f"a real {kind} {chance}"
        if not is_real:
            tail = f"a {kind} is possible but not shown {chance}"
            tail += f"; {limit}" if worst > 0 else ""
    elif worst > scale.useful:
        tail = f"too few {scale.noun} ({n:,}) to tell; {limit}"
    else:
        tail = f"no evidence of a loss with {n:,} {scale.noun}; {limit}"
    return f"{amount or _amount(scale, shift, decimals)}, 95% interval {interval}: {tail}"


def _amount(scale: _Scale, shift: float, decimals: int) -> str:
    shift = metrics.free_of_noise(shift)
    if not round(shift, decimals):
        return "no difference"
    return f"{abs(shift):,.{decimals}f}{scale.unit} {'higher' if shift > 0 else 'lower'}"


def _chance(p: float) -> str:
    if p < 0.0001:
        return "p < 0.0001"
    if p < 0.001:
        return f"p = {p:.1g}"
    # Three decimals, unless they would show the threshold itself.
    return f"p = {p:.{4 if abs(p - ALPHA) < 0.0005 else 3}f}"


def _decimals(scale: _Scale, low: float, high: float) -> int:
    """Enough decimals to distinguish the ends of an interval from each other and from zero."""
    for decimals in range(scale.decimals, MOST_DECIMALS):
        crossed = low > 0 >= _outward(low, -1, decimals) or high < 0 <= _outward(high, 1, decimals)
        if (high - low) * 10**decimals >= 4 and not crossed:
            return decimals
    return MOST_DECIMALS


def _outward(value: float, side: int, decimals: int) -> float:
    """Rounded away from the middle: what is called ruled out must be."""
    return side * math.ceil(side * value * 10**decimals - 1e-9) / 10**decimals + 0.0
