"""Gathers statistics of the inputs of a block's linears while batches run through it.

Linears that read one input share its statistics; they are found by watching which receive the same
tensor.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quantkit import numbers
from quantkit.methods.statistics import Statistics
from quantkit.model.architecture import EXPERT
from quantkit.model.experts import Experts
from quantkit.numbers.activations import round_inputs
from quantkit.onepass.padding import Keep, real
from quantkit.onepass.ranks import Ranks
from quantkit.schemes import ActivationScheme


@dataclass
class Collector:
    """Watches the linears of one block while batches run through it."""

    linears: dict[str, torch.nn.Linear]
    mixtures: dict[str, Experts] = field(default_factory=dict)
    """Experts whose common input is watched too: one scale serves the layers of all of them."""
    hold_out: bool = False
    """Keep statistics of some tokens apart as well."""
    n_kept: int = 0
    """Inputs of each that are kept as they are."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    drifts: bool = False
    """Keep how far inputs are from those that `following` saw, and from what they round to."""
    roundings: Mapping[str, ActivationScheme] = field(default_factory=dict)
    """Linears that are given rounded inputs."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Linears that share an input, under the name of the first."""
    statistics: dict[str, Statistics] = field(default_factory=dict)
    _alive: dict[int, tuple[str, torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    """Inputs of the present forward pass by identity, each with what it rounds to; kept, so that
    no identity is used twice."""
    _wanted: dict[str, torch.Tensor] = field(default_factory=dict)
    """The source's own inputs in the same batch."""
    _last: str = ""
    """The linear that was reached last."""

    @contextmanager
    def watching(self, keep: Keep = None, statesonly: bool = False) -> Iterator[None]:
        """Collect the positions to keep from the one forward pass within.

        With `statesonly` the pass's result is wrong from the second time on: what the last linear
        computes would be thrown away, so it computes nothing.
        """
        handles = [
            linear.register_forward_pre_hook(partial(self._see, name, keep))
            for name, linear in self.linears.items()
        ]
        handles += [
            module.register_forward_pre_hook(partial(self._see_all, name, keep), with_kwargs=True)
            for name, module in self.mixtures.items()
        ]
        last = self.linears.get(self._last) if statesonly else None
        if last is not None:
            last.forward = partial(_nothing, last.out_features)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if last is not None:
                del last.forward
            for handle in handles:
                handle.remove()
            self._alive.clear()
            self._wanted.clear()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep the inputs of the source's own pass within, for the pass that comes next."""

        def keep(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self._wanted[name] = inputs[0]

        handles = [
            linear.register_forward_pre_hook(partial(keep, name))
            for name, linear in self.linears.items()
            if not EXPERT.search(name)  # routers may send other tokens to an expert
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def complete(self, ranks: Ranks | None = None) -> None:
        """All batches have been seen; what other ranks saw is added."""
        if ranks is not None:
            self._add_up(ranks)
        for statistics in self.statistics.values():
            statistics.complete()

    def _add_up(self, ranks: Ranks) -> None:
        widths = {name: len(found.total) for name, found in self.statistics.items()}
        # A rank without samples has seen no layer: the first says which there are.
        self.groups, widths = ranks.share((self.groups, widths))
        device = next(iter(self.linears.values())).weight.device
        self.statistics = {
            name: self.statistics.get(name)
            or Statistics.zeros(width, device, self.hold_out, self._drifts(name))
            for name, width in widths.items()
        }
        all_of_them = list(self.statistics.values())
        counts = torch.tensor([found.n_tokens for found in all_of_them], device=device)
        ranks.sum_([counts, *(t for found in all_of_them for t in (found.gram, found.total))])
        apart = [t for found in all_of_them for t in (found.held, found.drift, found.held_drift)]
        ranks.sum_([matrix for matrix in apart if matrix is not None])
        ranks.max_([found.max_abs for found in all_of_them])
        for found, n_tokens in zip(all_of_them, counts.tolist(), strict=True):
            found.n_tokens = n_tokens

    def _see(
        self, name: str, keep: Keep, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        (tensor,) = inputs
        if id(tensor) not in self._alive:
            scheme = self.roundings.get(name)
            rounded = None if scheme is None else _rounded(tensor, scheme)
            self._alive[id(tensor)] = name, tensor, rounded
        leader, _, rounded = self._alive[id(tensor)]
        members = self.groups.setdefault(leader, [])
        if name not in members:
            members.append(name)
        if leader == name:
            if name not in self.statistics:
                self.statistics[name] = Statistics.zeros(
                    tensor.shape[-1], tensor.device, self.hold_out, self._drifts(name)
                )
            # Experts get real tokens only, and not all of them.
            keep = None if EXPERT.search(name) else keep
            wanted, states = self._wanted.pop(name, None), real(tensor, keep)
            self.statistics[name].add(
                states,
                None if rounded is None else real(rounded, keep),
                None if wanted is None else real(wanted, keep),
            )
            if self.n_kept:
                self._keep(name, states)
        self._last = name
        return None if rounded is None else (rounded,)

    def _drifts(self, name: str) -> bool:
        """Of experts only the rounding of inputs is known."""
        return self.drifts and (not EXPERT.search(name) or name in self.roundings)

    def _keep(self, name: str, states: torch.Tensor) -> None:
        """Some inputs of every batch, evenly spread, until there are enough."""
        flat = states.reshape(-1, states.shape[-1])
        before = self.kept.get(name, flat[:0])
        missing = min(self.n_kept - len(before), -(-self.n_kept // 4))
        if missing > 0 and len(flat):
            some = flat[:: -(-len(flat) // missing)]
            self.kept[name] = torch.cat((before, some))

    def _see_all(
        self, name: str, keep: Keep, module: Experts, inputs: Any, named: dict[str, Any]
    ) -> None:
        tensor = module.states(inputs, named)
        if name not in self.statistics:
            self.statistics[name] = Statistics.zeros(tensor.shape[-1], tensor.device)
        self.statistics[name].add(real(tensor, keep))


def _rounded(tensor: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Inputs as they are rounded at run time; a scale that is still to be found is the batch's."""
    stored = None
    if scheme.is_static:
        number, largest = numbers.of(scheme), tensor.abs().amax().float().clamp(min=1e-12)
        whole = number.has_global_scale
        stored = number.global_scale(largest) if whole else number.activation_scale(largest)
    return round_inputs(tensor, scheme, stored)


def _nothing(width: int, inputs: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of a linear's output, in the memory of one."""
    return inputs.new_zeros(1).expand(*inputs.shape[:-1], width)
