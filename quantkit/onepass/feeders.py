"""Finds what produces the input of a group of linears, so that scales can be folded into it.

A norm is found by observing whose output the linears read, and accepted after a trial: its output
is divided by powers of two per channel, every reader's columns are multiplied by them, and the
block must compute the same. Readers that are never quantised (a router, a shared expert's gate) are
included; with powers of two they stay exact. The value projection before `o_proj` and the up
projection before `down_proj` are proposed by name and tried likewise, those of all experts at once.
Families without a norm there, or with something in between, fold nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quantkit import families
from quantkit.model.architecture import EXPERT, is_kept
from quantkit.model.experts import Experts
from quantkit.onepass.padding import Keep, real


@dataclass(frozen=True)
class Feeder:
    """A place to fold the inverse of an input scale into."""

    name: str
    """Module within the block."""
    is_norm: bool
    readers: frozenset[str]
    """All linears that read its output: a scale is folded for all of them or for none."""
    offset: float = 0.0
    """Norms of some families multiply by 1 + w."""
    others: tuple[str, ...] = ()
    """Readers that are never quantised: their columns take the scale, which is a power of two."""
    experts: str = ""
    """Experts that read it, all of them; their common input has its own statistics."""
    repeat: int = 1
    """Input heads per head of the feeder."""
    head_width: int = 1

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Reduce per-input values to the feeder's own channels, by their mean."""
        if self.repeat == 1:
            return values
        return values.view(-1, self.repeat, self.head_width).mean(1).reshape(-1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse: one value of the feeder for every input channel that it feeds."""
        if self.repeat == 1:
            return values
        heads = values.view(-1, 1, self.head_width)
        return heads.expand(-1, self.repeat, -1).reshape(-1)


@torch.no_grad()
def find(
    block: torch.nn.Module,
    groups: dict[str, list[str]],
    forward: Callable[[], Any],
    head_width: int,
    keep: Keep = None,
) -> dict[str, Feeder]:
    """The feeder of every group that has one; `forward` runs the block on one sample.

    `keep` says which positions of that sample are real.
    """
    linears = [n for n, module in block.named_modules() if isinstance(module, torch.nn.Linear)]
    routed = {n: m for n, m in block.named_modules() if isinstance(m, Experts)}
    readers = {*linears, *_readers(block), *routed}
    inputs, norms = _watch(block, sorted(readers), forward)
    found: dict[str, Feeder] = {}
    for norm in dict.fromkeys(norms.values()):
        feeder = _try_norm(block, norm, [n for n in norms if norms[n] == norm], routed, forward)
        if feeder is not None:
            found |= {leader: feeder for leader in groups if leader in feeder.readers}
    apart = {leader for leader in groups if EXPERT.search(leader)}
    for target, proposed in families.folds():
        for leader, members in groups.items():
            parent, _, last = leader.rpartition(".")
            name = f"{parent}.{proposed}" if parent else proposed
            if leader in apart or last != target or len(members) != 1 or not _has(block, name):
                continue
            before = real(inputs[leader], keep)
            linear = _try_linear(block, leader, name, before, forward, head_width, keep)
            if linear is not None:
                found[leader] = linear
    for name, module in routed.items():
        if module.is_linear_in_up():
            for index in range(module.n_experts):
                leader = f"{name}.{index}.down_proj"
                if leader in groups:
                    own = f"{name}.{index}.up_proj"
                    found[leader] = Feeder(own, False, frozenset({leader}))
    return found


def _readers(block: torch.nn.Module) -> list[str]:
    """Modules other than Linear with a matrix, such as routers; not those within experts."""
    return [
        name
        for name, module in block.named_modules()
        if not EXPERT.search(f"{name}.")
        and not isinstance(module, torch.nn.Linear)
        and getattr(module._parameters.get("weight"), "ndim", 0) == 2
    ]


def _has(block: torch.nn.Module, name: str) -> bool:
    return any(module_name == name for module_name, _ in block.named_modules())


def _watch(
    block: torch.nn.Module, readers: list[str], forward: Callable[[], Any]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What each of these modules reads, and the norm whose output that is, in any shape."""
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[tuple[int, int], tuple[str, torch.Tensor]] = {}

    def read(name: str, module: torch.nn.Module, arguments: Any, named: Any) -> None:
        if isinstance(module, Experts) and not module.is_routed:
            return  # its tokens are repeated
        values = [v for v in (*arguments, *named.values()) if isinstance(v, torch.Tensor)]
        if values:
            inputs[name] = values[0]

    def written(name: str, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs[_place(output)] = name, output  # kept, so that no memory is reused

    handles = [
        block.get_submodule(n).register_forward_pre_hook(partial(read, n), with_kwargs=True)
        for n in readers
    ]
    handles += [
        module.register_forward_hook(partial(written, name))
        for name, module in block.named_modules()
        if name and "norm" in type(module).__name__.lower() and hasattr(module, "weight")
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    places = {n: _place(tensor) for n, tensor in inputs.items()}
    norms = {n: outputs[place][0] for n, place in places.items() if place in outputs}
    return inputs, norms


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """A tensor's memory location: the same for the same numbers in another shape."""
    return tensor.data_ptr(), tensor.numel()


def _try_norm(
    block: torch.nn.Module,
    name: str,
    readers: list[str],
    routed: dict[str, Experts],
    forward: Callable[[], Any],
) -> Feeder | None:
    """A norm as the feeder, if only these readers see its output."""
    norm = block.get_submodule(name)
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    if weight.ndim != 1:
        return None
    experts = next((n for n in readers if n in routed), "")
    upper = []
    if experts:
        layers = ("gate_proj", "up_proj") if routed[experts].gated else ("up_proj",)
        indices = range(routed[experts].n_experts)
        upper = [f"{experts}.{index}.{layer}" for index in indices for layer in layers]
    plain = [n for n in readers if n not in routed]
    modules = dict(block.named_modules())
    others = tuple(
        n for n in plain if is_kept(n, modules) or not isinstance(modules[n], torch.nn.Linear)
    )
    changed = [block.get_submodule(n) for n in (*plain, *upper)]
    width = weight.shape[0]
    if any(_matrix(module).shape[1] != width for module in changed):
        return None  # per-head weights or the like
    factor = _powers(width, weight)
    before = forward()
    originals = [_matrix(module).data for module in changed]
    handle = norm.register_forward_hook(lambda module, inputs, output: output / factor)
    try:
        for module, original in zip(changed, originals, strict=True):
            _matrix(module).data = original * factor.to(original.dtype)
        after = forward()
    finally:
        handle.remove()
        for module, original in zip(changed, originals, strict=True):
            _matrix(module).data = original
    if not _follows(after, before):
        return None
    offset = _offset(norm, weight)
    if others and offset:
        return None  # what is stored is the weight minus one, which no power of two divides exactly
    names = frozenset(n for n in (*plain, *upper) if n not in others)
    return Feeder(name, True, names, offset, others, experts)


def _matrix(module: torch.nn.Module) -> torch.nn.Parameter:
    weight = module.weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight


def _powers(width: int, like: torch.Tensor) -> torch.Tensor:
    """Powers of two, which commute with every rounding; large ones reveal limits and clamps."""
    factor = torch.ones(width, device=like.device, dtype=like.dtype)
    factor[::3], factor[1::3] = 4096.0, 0.5
    return factor


def _offset(norm: torch.nn.Module, weight: torch.Tensor) -> float:
    sample = torch.ones(1, 1, weight.shape[0], device=weight.device, dtype=weight.dtype)
    silent = torch.func.functional_call(norm, {"weight": torch.zeros_like(weight)}, (sample,))
    return 0.0 if not silent.any() else 1.0


def _try_linear(
    block: torch.nn.Module,
    leader: str,
    name: str,
    before: torch.Tensor,
    forward: Callable[[], Any],
    head_width: int,
    keep: Keep,
) -> Feeder | None:
    """A linear as the feeder, if scaling its rows scales what the leader reads and nothing else."""
    linear = block.get_submodule(name)
    assert isinstance(linear, torch.nn.Linear)
    rows = linear.weight.shape[0]
    reader = block.get_submodule(leader)
    assert isinstance(reader, torch.nn.Linear)
    width = reader.weight.shape[1]
    if width % rows:
        return None
    feeder = Feeder(name, False, frozenset({leader}), repeat=width // rows, head_width=head_width)
    factor = _powers(rows, linear.weight)
    original = linear.weight.data, None if linear.bias is None else linear.bias.data
    linear.weight.data = linear.weight.data * factor[:, None]
    if linear.bias is not None:
        linear.bias.data = linear.bias.data * factor
    try:
        after = _watch(block, [leader], forward)[0][leader]
    finally:
        linear.weight.data = original[0]
        if original[1] is not None:
            linear.bias.data = original[1]
    after = real(after, keep)
    return feeder if _follows(after, before * feeder.spread(factor)) else None


def _follows(after: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether every channel is what it should be, within one rounding of the compute dtype.

    Scaling by powers of two changes exponents only: sums and products are bit-identical in any
    dtype. Two things may still differ. A kernel that adds in another order the second time rounds
    its result once more: at most `eps / 2` of each value, hence of the norm of a channel. And
    values below the smallest normal number lose a bit when they are halved.
    """
    rounding = torch.finfo(expected.dtype)
    off, size = (
        torch.linalg.vector_norm(values.reshape(-1, values.shape[-1]).double(), dim=0)
        for values in (after.double() - expected.double(), expected)
    )
    n_positions = expected.numel() // expected.shape[-1]
    halved = rounding.smallest_normal * rounding.eps * n_positions**0.5
    return bool((off <= rounding.eps / 2 * size + halved).all())  # false for NaN, too
