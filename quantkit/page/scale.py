"""From values to positions in a figure: axes with round ticks, linear or logarithmic."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

UNKNOWN = "\N{EN DASH}"
"""Shown where there is no value."""
PADDING = 0.05
NARROWEST = 1.5
"""The smallest ratio between the ends of a logarithmic scale."""
STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Axis:
    """The meaning of one direction of a figure."""

    label: str
    log: bool = False
    percent: bool = False
    """Values are fractions of one."""
    digits: int | None = None
    """Digits after the point; by default as many as four significant digits need."""

    def takes(self, value: float | None) -> bool:
        """Whether a value can be shown on it."""
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    def show(self, value: float | None) -> str:
        """A value in full, for tables and tooltips."""
        if value is None or not math.isfinite(value):
            return UNKNOWN
        if self.percent:
            return f"{value:.{2 if self.digits is None else self.digits}%}"
        return number(value) if self.digits is None else f"{value:,.{self.digits}f}"


@dataclass(frozen=True)
class Scale:
    """An axis with its ends in values and in the figure's units."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        """The position of a value."""
        if self.axis.log:
            value, low, high = (math.log10(v) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def tick_text(self, tick: float) -> str:
        """A tick's label, with enough digits to distinguish it from its neighbours."""
        if self.axis.log or len(self.ticks) < 2:
            shown = f"{tick * (100 if self.axis.percent else 1):,.6g}".replace("e-0", "e-")
            return f"{shown}%" if self.axis.percent else shown
        factor = 100 if self.axis.percent else 1
        step = (self.ticks[1] - self.ticks[0]) * factor
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        largest = factor * max(map(abs, self.ticks))
        if largest < 1e-4:
            shown = f"{tick * factor:.{digits + math.floor(math.log10(largest))}e}"
            return f"{shown}%" if self.axis.percent else shown
        return f"{tick * factor:,.{digits}f}{'%' if self.axis.percent else ''}"


def scale(
    values: Iterable[float | None],
    axis: Axis,
    start: float,
    end: float,
    n_ticks: int = 5,
    with_zero: bool = False,
    ends: Literal["round", "padded", "exact"] = "round",
) -> Scale:
    """A scale that holds all values."""
    known = [v for v in values if v is not None and axis.takes(v)]
    if axis.log:
        low, high = (min(known), max(known)) if known else (1.0, 10.0)
        if high < low * NARROWEST:
            low, high = low / NARROWEST, high * NARROWEST
        if ends == "round":
            low, high = _round_down(low), _round_up(high)
        elif ends == "padded":
            more = (high / low) ** PADDING
            low, high = low / more, high * more
        return Scale(axis, low, high, start, end, log_ticks(low, high, n_ticks))
    if with_zero:
        known.append(0.0)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal, as far as ticks can show
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
        low = 0.0 if with_zero and low > 0 else low
    step = _step(high - low, n_ticks)
    if ends == "padded":
        low, high = low - PADDING * (high - low), high + PADDING * (high - low)
    if ends == "round":
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(axis, low, high, start, end, ticks(low, high, n_ticks))


def ticks(low: float, high: float, n: int = 5) -> tuple[float, ...]:
    """About `n` round values from `low` to `high`."""
    step = _step(high - low, n)
    digits = max(0, 2 - math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(k * step, digits) + 0.0 for k in range(first, last + 1))


def log_ticks(low: float, high: float, n: int = 5) -> tuple[float, ...]:
    """Powers of ten, or their multiples where there are too few of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / n))
    for parts in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        found = [
            part * 10.0**k
            for k in range(first, last + 1, stride)
            for part in parts
            if low * (1 - 1e-9) <= part * 10.0**k <= high * (1 + 1e-9)
        ]
        if len(found) >= min(3, n) or stride > 1:
            return tuple(found)
    return tuple(found) if len(found) > 1 else tuple(t for t in ticks(low, high, n) if t > 0)


def number(value: float) -> str:
    """A number for display: four significant digits, integers in full."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 0 < abs(value) < 1e-4:
        return f"{value:.3e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _step(width: float, n: int) -> float:
    rough = width / max(1, n)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(s * power for s in STEPS if s * power >= rough * (1 - 1e-9))


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-12)
    return max(s for s in STEPS if s * power <= value * (1 + 1e-9)) * power


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value) + 1e-12)
    return min(s for s in STEPS if s * power >= value * (1 - 1e-9)) * power
