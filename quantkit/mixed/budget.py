"""From a budget to a choice of formats: bits per weight, bytes of files, or a GPU's free memory."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quantkit.errors import HardwareError, UsageError
from quantkit.mixed.allocation import Allocation, Infeasible, solve
from quantkit.mixed.table import Table
from quantkit.recipe import AnyRecipe
from quantkit.storage import gib

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|[KMGT]i?B)", re.IGNORECASE)
_UNITS = {"b": 1, **{f"{p}b": 1000 ** (n + 1) for n, p in enumerate("kmgt")}}
_UNITS |= {f"{p}ib": 1024 ** (n + 1) for n, p in enumerate("kmgt")}


def size_bytes(text: str) -> int:
    """`9GiB`, `700MB` or `12345B` as bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"'{text}' is not a size such as 9GiB or 700MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True)
class Budget:
    """What was asked for: either bits or bytes."""

    bits: float | None = None
    """Stored bits per weight of the layers that can be quantised, scales included."""
    size_bytes: int | None = None
    """Size of all weight files."""
    words: str = ""
    """What the size is for, where a GPU determines it."""
    name: str = ""
    """Name of the recipe that is made from it."""
    only_common: bool = False
    """Whether the GPU is one that integers of 4 and 8 bits run on, and none of other widths."""

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.size_bytes is None):
            raise UsageError("give one of --bits and --size")
        if self.bits is not None and not 0 < self.bits < 1000:
            raise UsageError(f"--bits {self.bits:g}: give bits per weight, such as 4.5")

    @property
    def label(self) -> str:
        """The recipe's name."""
        if self.name:
            return self.name
        if self.bits is not None:
            return f"mixed-{self.bits:g}bits"
        assert self.size_bytes is not None
        return f"mixed-{gib(self.size_bytes).replace(' ', '')}"

    @property
    def description(self) -> str:
        """The budget in words."""
        if self.words:
            return self.words
        if self.bits is not None:
            return f"{self.bits:g} bit{'s' * (self.bits != 1)} per quantised weight"
        assert self.size_bytes is not None
        return gib(self.size_bytes)


@dataclass(frozen=True)
class Choice:
    """The formats that a budget allows."""

    table: Table
    """The table, with the formats that were considered."""
    budget: Budget
    allocation: Allocation
    recipe: AnyRecipe | None
    """None: everything stays in 16 bits."""
    notes: list[str] = field(default_factory=list)

    @property
    def bits(self) -> float:
        """Stored bits per weight of the units."""
        return self.table.bits_of(self.allocation.choice)

    @property
    def counts(self) -> dict[str, int]:
        """Number of weights per format in use, in the table's order."""
        found = dict.fromkeys(self.table.formats, 0)
        for unit, place in zip(self.table.units, self.allocation.choice, strict=True):
            found[self.table.formats[place]] += unit.n_weights
        return {name: n for name, n in found.items() if n}

    def of_unit(self) -> dict[str, str]:
        """The format of each unit."""
        pairs = zip(self.table.units, self.allocation.choice, strict=True)
        return {unit.name: self.table.formats[place] for unit, place in pairs}


class Target(Protocol):
    """What depends on the engine."""

    def names(self, formats: Sequence[str]) -> list[str]:
        """Formats by their names or by those of mixes."""

    def is_common(self, format: str) -> bool:
        """Whether the engine runs it on every GPU, as far as it has kernels for its kind."""

    def recipe(
        self, table: Table, choice: Sequence[int], name: str, summary: str
    ) -> AnyRecipe | None:
        """The recipe of a choice; None where everything stays in 16 bits."""

    def file_bytes(self, recipe: AnyRecipe | None) -> int:
        """Size of all weight files of a recipe; for None of the source."""


def choose(table: Table, budget: Budget, target: Target, formats: Sequence[str] = ()) -> Choice:
    """The formats with the least predicted cost within a budget."""
    names = _names(table, target, formats)
    if budget.only_common and not formats:
        names = [name for name in names if target.is_common(name)]
    found = _chosen(table.only(names), budget, target)
    if special := [name for name in found.counts if not target.is_common(name)]:
        found.notes.append(
            f"{', '.join(special)}: for vLLM 0.25 or later on NVIDIA GPUs from compute capability "
            "7.5; elsewhere, use --formats int4-int8"
        )
    return found


def _names(table: Table, target: Target, formats: Sequence[str]) -> list[str]:
    if not formats:
        return table.formats
    wanted = target.names(formats)
    if missing := [name for name in wanted if name not in table.formats]:
        raise UsageError(
            f"the table has no {missing[0]}; it has {', '.join(table.formats)}. Make one with "
            "`quantkit sensitivity --formats`"
        )
    return wanted


def _chosen(table: Table, budget: Budget, target: Target) -> Choice:
    """Solve, and if the files turn out larger than their tensors, solve again with less."""
    costs, sizes = table.costs(), table.sizes()
    limit = budget.size_bytes
    room = int(budget.bits * table.n_weights / 8) if budget.bits is not None else 0
    if limit is not None:
        room = limit - table.other_bytes
    for _ in range(8):
        try:
            found = solve(costs, sizes, room)
        except Infeasible as error:
            raise _too_small(table, budget, target, error.smallest) from error
        made = target.recipe(table, found.choice, budget.label, _summary(table, found))
        over = target.file_bytes(made) - limit if limit is not None else 0
        if over <= 0:
            break
        room = min(room, found.size_bytes) - over
    choice = Choice(table, budget, found, made)
    if made is None:
        choice.notes.append(
            f"{budget.description} is room for all of {table.model} in 16 bits: there is nothing "
            "to quantise"
        )
    return choice


def _summary(table: Table, found: Allocation) -> str:
    used = {table.formats[place] for place in found.choice}
    named = ", ".join(name for name in table.formats if name in used)
    bits = table.bits_of(found.choice)
    return f"{bits:.2f} bits per quantised weight, chosen layer by layer from {named}"


def _too_small(table: Table, budget: Budget, target: Target, smallest: int) -> HardwareError:
    least = [min(s for s in unit.sizes if s is not None) for unit in table.units]
    choice = [unit.sizes.index(size) for unit, size in zip(table.units, least, strict=True)]
    bits = 8 * smallest / table.n_weights
    made = target.recipe(table, choice, budget.label, "smallest")
    size = target.file_bytes(made)
    listed = ", ".join(table.formats[:-1])
    return HardwareError(
        f"{budget.description} is too little for {table.model} in {listed}: the smallest that "
        f"works is {bits:.3f} bits per quantised weight, {gib(size)} ({size:,} bytes) of files"
    )


def one_percent_more(choice: Choice) -> str:
    """What a budget one percent larger would buy, in words; empty where it buys nothing."""
    table, now = choice.table, choice.allocation
    budget = choice.budget
    whole = budget.size_bytes
    if whole is None:
        assert budget.bits is not None
        whole = int(budget.bits * table.n_weights / 8)
    more = solve(table.costs(), table.sizes(), now.size_bytes + whole // 100)
    if not more.cost < now.cost:
        return ""
    room = gib(whole / 100) if whole >= 100 << 20 else f"{whole / 100 / 1024:.0f} KiB"
    return (
        f"1% more room ({room}) would buy {1 - more.cost / now.cost:.1%} less predicted KL, at "
        f"{table.bits_of(more.choice):.2f} bits per quantised weight."
    )


def comments(choice: Choice) -> list[str]:
    """The comments above the recipe: why it is what it is."""
    table, found = choice.table, choice.allocation
    weighted = table.is_weighted
    cost = "predicted KL" if weighted else "sum of relative output errors"
    total = sum(choice.counts.values())
    lines = [
        f"Chosen for {choice.budget.description} from the table of {table.model}, calibrated on "
        f"{table.calibration}:",
        f"{choice.bits:.2f} bits per quantised weight, {cost} {found.cost:.3g}"
        + (" nats per token" if weighted else "")
        + f", at most {found.gap:.1%} from the optimum.",
        "Weights by format: "
        + ", ".join(f"{name} {n / total:.1%}" for name, n in choice.counts.items())
        + ".",
    ]
    lines += choice.notes
    return lines
