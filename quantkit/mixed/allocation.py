"""The best choice of one format per unit within a budget of bytes.

A multiple-choice knapsack. Its relaxation to a linear programme is solved by taking steps along
each unit's lower convex hull, best improvement per byte first; that gives the bound. Dynamic
programming over bytes then fills what the relaxation leaves: exactly where the sizes' common
divisor keeps the number of steps small enough, otherwise on a grid of bytes that is rounded up, so
that a choice always fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    Costs = Sequence[Sequence[float | None]]
    Sizes = Sequence[Sequence[int | None]]

MOST_PLACES = 1 << 17
MOST_WORK = 1 << 26
"""Upper limit for the dynamic programme's states times formats: about half a second."""


class Infeasible(QuantkitError):
    """Nothing fits; `smallest` is the smallest size that can be had."""

    def __init__(self, smallest: int) -> None:
        super().__init__(f"the smallest choice takes {smallest} bytes")
        self.smallest = smallest


@dataclass(frozen=True)
class Allocation:
    """A choice for every unit."""

    choice: tuple[int, ...]
    """Indices into each unit's list of formats."""
    cost: float
    size_bytes: int
    bound: float
    """No choice within the budget costs less."""

    @property
    def gap(self) -> float:
        """How much better another choice could be at most, relative to this one."""
        return 0.0 if self.cost <= self.bound else 1 - self.bound / self.cost


def solve(costs: Costs, sizes: Sizes, budget: int) -> Allocation:
    """The cheapest choice that fits; None marks formats that a unit cannot have."""
    (found,) = solve_each(costs, sizes, [budget])
    return found


def solve_each(costs: Costs, sizes: Sizes, budgets: Sequence[int]) -> list[Allocation]:
    """The same for several budgets, with one dynamic programme, which the largest shapes."""
    options = [_options(c, s) for c, s in zip(costs, sizes, strict=True)]
    smallest = sum(unit[0][1] for unit in options)
    if smallest > min(budgets):
        raise Infeasible(smallest)
    made = []
    for budget, stepped in zip(budgets, _stepped(options, budgets), strict=True):
        relaxed, bound = _relaxed(options, budget)
        best = min(stepped, relaxed, key=lambda picks: _total(options, picks))
        choice = tuple(unit[pick][0] for unit, pick in zip(options, best, strict=True))
        cost = _total(options, best)
        size = sum(unit[pick][1] for unit, pick in zip(options, best, strict=True))
        made.append(Allocation(choice, cost, size, min(bound, cost)))
    return made


_Option = tuple[int, int, float]
"""Index in the unit's list, bytes, cost."""


def _options(costs: Sequence[float | None], sizes: Sequence[int | None]) -> list[_Option]:
    """A unit's options by size, without those that are larger and no better."""
    pairs = enumerate(zip(costs, sizes, strict=True))
    known = [(place, s, c) for place, (c, s) in pairs if s is not None and c is not None]
    assert known, "a unit has no format"
    kept: list[_Option] = []
    for option in sorted(known, key=lambda o: (o[1], o[2])):
        if not kept or option[2] < kept[-1][2]:
            kept.append(option)
    return kept


def _relaxed(options: list[list[_Option]], budget: int) -> tuple[list[int], float]:
    """The linear programme's choice rounded down to whole units, and its value."""
    steps = []
    for place, unit in enumerate(options):
        hull = _hull(unit)
        for here, there in pairwise(hull):
            size, gain = unit[there][1] - unit[here][1], unit[here][2] - unit[there][2]
            steps.append((gain / size, place, there, size, gain))
    steps.sort(key=lambda step: -step[0])
    picks = [0] * len(options)
    room = budget - sum(unit[0][1] for unit in options)
    cost = bound = _total(options, picks)
    stopped: set[int] = set()
    is_whole = True
    for rate, place, there, size, gain in steps:
        if size <= room and place not in stopped:
            picks[place], room, cost = there, room - size, cost - gain
            if is_whole:
                bound = cost
        else:
            if is_whole:
                bound, is_whole = cost - rate * room, False
            stopped.add(place)
    return picks, bound


def _hull(unit: list[_Option]) -> list[int]:
    """Indices of the options on the lower convex hull of cost over size."""
    hull: list[int] = []
    for place in range(len(unit)):
        while len(hull) > 1 and _slope(unit, hull[-2], hull[-1]) >= _slope(unit, hull[-1], place):
            hull.pop()
        hull.append(place)
    return hull


def _slope(unit: list[_Option], here: int, there: int) -> float:
    return (unit[there][2] - unit[here][2]) / (unit[there][1] - unit[here][1])


def _stepped(options: list[list[_Option]], budgets: Sequence[int]) -> list[list[int]]:
    """Dynamic programming over the bytes that each unit takes above its smallest option."""
    import numpy as np

    extra = [[option[1] - unit[0][1] for option in unit] for unit in options]
    most, smallest = sum(max(sizes) for sizes in extra), sum(unit[0][1] for unit in options)
    room = min(max(budgets) - smallest, most)
    step = math.gcd(*(size for sizes in extra for size in sizes)) or 1
    most_places = min(MOST_PLACES, max(2, MOST_WORK // sum(map(len, options))))
    if room // step >= most_places:
        step = -(-room // (most_places - 1))
    n_places = room // step + 1
    best = np.zeros(n_places)
    picks: list[np.ndarray] = []
    for unit, sizes in zip(options, extra, strict=True):
        taken = np.zeros(n_places, dtype=np.uint8)
        found = best + unit[0][2]
        for pick in range(1, len(unit)):
            need = -(-sizes[pick] // step)
            if need >= n_places:
                break
            other = best[: n_places - need] + unit[pick][2]
            here = found[need:]
            better = other < here
            here[better] = other[better]
            taken[need:][better] = pick
        best = found
        picks.append(taken)
    made = []
    for budget in budgets:
        place = int(best[: (budget - smallest) // step + 1].argmin())
        chosen = []
        for taken, sizes in zip(reversed(picks), reversed(extra), strict=True):
            pick = int(taken[place])
            chosen.append(pick)
            place -= -(-sizes[pick] // step)
        made.append(chosen[::-1])
    return made


def _total(options: list[list[_Option]], picks: Sequence[int]) -> float:
    return math.fsum(unit[pick][2] for unit, pick in zip(options, picks, strict=True))
