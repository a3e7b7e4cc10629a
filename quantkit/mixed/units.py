"""What is quantised together: layers that an engine fuses, and all experts of a block."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit import families
from quantkit.model.architecture import EXPERT
from quantkit.plan.checkpoint import fused_with

NUMBER = re.compile(r"^(.*?)\.(\d+)\.(.*)$")
"""A block list's name, the index in it, and the rest of a module's name."""
FUSED_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "w1": "w13"}
"""vLLM's name of a fused layer, by the first of its parts."""


@dataclass(frozen=True)
class Unit:
    """Modules that share one format."""

    name: str
    modules: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The same for this sort of unit in every block, such as `self_attn.q_proj+k+v`."""
        match = NUMBER.match(self.name)
        return match[3] if match else self.name

    @property
    def block(self) -> str:
        """The block's number; empty outside the blocks."""
        match = NUMBER.match(self.name)
        return match[2] if match else ""


def fused(modules: Sequence[str]) -> list[Unit]:
    """Units as vLLM needs them: one format per fused layer, and one for all experts of a block."""
    among = set(modules)
    found: dict[str, list[str]] = {}
    for module in modules:
        expert = EXPERT.search(module)
        if expert is not None:
            found.setdefault(module[: expert.start()] + ".experts", []).append(module)
            continue
        members = fused_with(module, among)
        found.setdefault(_fused_name(members), []).append(module)
    return [Unit(name, tuple(members)) for name, members in found.items()]


def single(modules: Sequence[str]) -> list[Unit]:
    """Every module on its own, as llama.cpp allows."""
    return [Unit(module, (module,)) for module in modules]


def _fused_name(members: list[str]) -> str:
    if len(members) == 1:
        return members[0]
    parent, _, first = members[0].rpartition(".")
    return f"{parent}.{FUSED_NAMES.get(first, first)}"


def patterns(units: Sequence[Unit]) -> list[str]:
    """Short patterns that match the modules of some units, and vLLM's names of the fused layers.

    vLLM looks for a fused layer's own name first, then for its class, and only then for the names
    of its parts: a pattern that names only these would lose to a group for all of class Linear.
    """
    found: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for unit in units:
        match = NUMBER.match(unit.name)
        if match is None:
            plain += unit.modules
            continue
        start = match[1].rpartition(".")[2]
        found.setdefault((start, _ending(unit)), []).append(int(match[2]))
    made = []
    for (start, ending), numbers in found.items():
        which = "|".join(map(str, sorted(numbers)))
        made.append(rf"re:.*\b{start}\.({which})\.{ending}$")
    return made + plain


def _ending(unit: Unit) -> str:
    """What follows the block's number, as a pattern."""
    if unit.name.endswith(".experts") and EXPERT.search(unit.modules[0]):
        return re.escape(unit.kind) + r"\..*"
    parent = unit.kind.rpartition(".")[0]
    lasts = [module.rpartition(".")[2] for module in unit.modules]
    if len(lasts) > 1:
        lasts.append(unit.name.rpartition(".")[2])
    ends = "|".join(map(re.escape, lasts))
    ends = f"({ends})" if len(lasts) > 1 else ends
    return f"{re.escape(parent)}\\.{ends}" if parent else ends


def are_whole(units: Sequence[Unit]) -> bool:
    """Whether no unit contains only a part of what vLLM fuses."""
    owner = {module: unit.name for unit in units for module in unit.modules}
    return all(
        len({owner[m] for m in fused_with(module, owner)}) == 1
        for module in owner
        if any(module.rpartition(".")[2] in parts for parts in families.fused())
    )
