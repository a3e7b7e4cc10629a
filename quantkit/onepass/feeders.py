"""What produces the input of a group of linears, so that scales can be folded into it.

A norm is found by watching which module's output is the very tensor that the linears read. The
value projection before `o_proj` and the up projection before `down_proj` are proposed by name, and
taken only after a trial: their outputs are scaled channel by channel, and the input of the linear
must follow exactly. Families without a norm there, or with something in between, fold nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quantkit import families
from quantkit.onepass.padding import Keep, real


@dataclass(frozen=True)
class Feeder:
    """A place to fold the inverse of an input scale into."""

    name: str
    """Module within the block."""
    is_norm: bool
    readers: frozenset[str]
    """All linears that read what it produces: a scale is folded for all of them or for none."""
    offset: float = 0.0
    """Norms of some families multiply by 1 + w."""
    repeat: int = 1
    """Heads of the input that one head of the feeder serves."""
    head_width: int = 1

    def shared(self, values: torch.Tensor) -> torch.Tensor:
        """Bring per-input values down to the feeder's own channels, by their mean."""
        if self.repeat == 1:
            return values
        return values.view(-1, self.repeat, self.head_width).mean(1).reshape(-1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse: one value of the feeder for every input channel that it serves."""
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
    inputs, norms = _watch(block, linears, forward)
    found = {}
    for leader in groups:
        if leader in norms:
            readers = frozenset(n for n in linears if norms.get(n) == norms[leader])
            found[leader] = _norm(block, norms[leader], readers)
    for target, feeder in families.folds():
        for leader, members in groups.items():
            parent, _, last = leader.rpartition(".")
            name = f"{parent}.{feeder}" if parent else feeder
            if last == target and len(members) == 1 and _has(block, name):
                before = real(inputs[leader], keep)
                linear = _try_linear(block, leader, name, before, forward, head_width, keep)
                if linear is not None:
                    found[leader] = linear
    return found


def _has(block: torch.nn.Module, name: str) -> bool:
    return any(module_name == name for module_name, _ in block.named_modules())


def _watch(
    block: torch.nn.Module, linears: list[str], forward: Callable[[], Any]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What each of these linears reads, and the norm whose output is that very tensor."""
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[int, tuple[str, torch.Tensor]] = {}

    def read(name: str, module: torch.nn.Module, arguments: Any) -> None:
        inputs[name] = arguments[0]

    def written(name: str, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs[id(output)] = name, output  # kept, so that no identity is used twice

    handles = [block.get_submodule(n).register_forward_pre_hook(partial(read, n)) for n in linears]
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
    norms = {n: outputs[id(tensor)][0] for n, tensor in inputs.items() if id(tensor) in outputs}
    return inputs, norms


def _norm(block: torch.nn.Module, name: str, readers: frozenset[str]) -> Feeder:
    norm = block.get_submodule(name)
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    sample = torch.ones(1, 1, weight.shape[0], device=weight.device, dtype=weight.dtype)
    silent = torch.func.functional_call(norm, {"weight": torch.zeros_like(weight)}, (sample,))
    return Feeder(name, True, readers, offset=0.0 if not silent.any() else 1.0)


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
    # Powers of two commute with every rounding, so what follows the trial follows it exactly.
    factor = torch.ones(rows, device=linear.weight.device, dtype=linear.weight.dtype)
    factor[::3], factor[1::3] = 2.0, 0.5
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
    """Whether every channel is what it should be, within one rounding of the compute type.

    Scaling by powers of two changes exponents alone: sums and products come out bit for bit, in
    whatever type they are kept. Two things may still differ. A kernel that adds in another order
    the second time rounds its result once more: at most `eps / 2` of each value, hence of the norm
    of a channel. And values below the smallest normal number lose a bit when they are halved.
    """
    rounding = torch.finfo(expected.dtype)
    off, size = (
        torch.linalg.vector_norm(values.reshape(-1, values.shape[-1]).double(), dim=0)
        for values in (after.double() - expected.double(), expected)
    )
    n_positions = expected.numel() // expected.shape[-1]
    halved = rounding.smallest_normal * rounding.eps * n_positions**0.5
    return bool((off <= rounding.eps / 2 * size + halved).all())  # false for NaN, too
