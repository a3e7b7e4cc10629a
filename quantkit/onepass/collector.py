"""Gathers statistics of the inputs of a block's linears while batches run through it.

Linears that read the same input share its statistics; they are found by observing which receive the
same tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quantkit import families
from quantkit.methods.statistics import Statistics
from quantkit.model.architecture import EXPERT
from quantkit.model.experts import Experts
from quantkit.onepass.padding import Keep, real, sample_lengths
from quantkit.onepass.ranks import Ranks

READ_BY_LATER = (*families.CACHED, "kv_b_proj")
"""Last names of the layers whose outputs for a token are read by attention from later tokens."""


@dataclass
class Collector:
    """Observes the linears of one block while batches run through it."""

    linears: dict[str, torch.nn.Linear]
    routed: dict[str, Experts] = field(default_factory=dict)
    """Experts whose common input is observed too: the layers of all of them share one scale."""
    hold_out: bool = False
    """Also keep statistics of held-out tokens separately."""
    n_raw_inputs: int = 0
    """Raw inputs kept per linear."""
    shares_experts: bool = False
    """Experts share the statistics of their common input, for lack of memory for those of each."""
    raw_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Linears that share an input, under the name of the first."""
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """By the name of a group's first linear; several may share one."""
    _alive: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Inputs of the current forward pass by identity; kept so that no identity is reused."""
    _common: dict[tuple[str, str], Statistics] = field(default_factory=dict)
    """What experts share."""
    _last: str = ""
    """The linear that was reached last, if every batch reaches it last."""

    @contextmanager
    def watching(self, keep: Keep = None, statesonly: bool = False) -> Iterator[None]:
        """Collect the positions to keep from the single forward pass within.

        With `statesonly` the pass's result is wrong from the second time on: the last linear's
        output would be discarded, so it computes nothing.
        """
        handles = [
            linear.register_forward_pre_hook(partial(self._see, name, keep))
            for name, linear in self.linears.items()
        ]
        handles += [
            module.register_forward_pre_hook(partial(self._see_all, name, keep), with_kwargs=True)
            for name, module in self.routed.items()
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

    def complete(self, ranks: Ranks | None = None) -> None:
        """All batches have been seen; add what other ranks saw."""
        if ranks is not None and self.linears:  # without, the block is copied as it is
            self._add_up(ranks)
        for statistics in self._each():
            statistics.complete()

    def _each(self) -> list[Statistics]:
        """All statistics, those that experts share once."""
        return list({id(found): found for found in self.statistics.values()}.values())

    def _new(self, name: str, width: int, device: torch.device) -> Statistics:
        """Statistics for a group, or those of another expert that reads the same input."""
        if self.shares_experts and (common := common_input(name)):
            if common not in self._common:
                self._common[common] = Statistics.zeros(width, device, self.hold_out)
            return self._common[common]
        return Statistics.zeros(width, device, self.hold_out)

    def _add_up(self, ranks: Ranks) -> None:
        widths = {name: len(found.total) for name, found in self.statistics.items()}
        # A rank without samples has seen no layer: the first says which exist.
        self.groups, widths = ranks.share((self.groups, widths))
        device = next(iter(self.linears.values())).weight.device
        self.statistics = {
            name: self.statistics.get(name) or self._new(name, width, device)
            for name, width in widths.items()
        }
        all_of_them = self._each()
        counts = torch.tensor([found.n_tokens for found in all_of_them], device=device)
        ranks.sum_([counts, *(t for found in all_of_them for t in (found.gram, found.total))])
        ranks.sum_([found.held_out for found in all_of_them if found.held_out is not None])
        ranks.max_([found.max_abs for found in all_of_them])
        for found, n_tokens in zip(all_of_them, counts.tolist(), strict=True):
            found.n_tokens = n_tokens

    def _see(
        self, name: str, keep: Keep, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        (tensor,) = inputs
        if id(tensor) not in self._alive:
            self._alive[id(tensor)] = name, tensor
        leader, _ = self._alive[id(tensor)]
        members = self.groups.setdefault(leader, [])
        if name not in members:
            members.append(name)
        if leader == name:
            if name not in self.statistics:
                self.statistics[name] = self._new(name, tensor.shape[-1], tensor.device)
            # Experts get real tokens only, and not all of them.
            keep = None if EXPERT.search(name) else keep
            states = real(tensor, keep)
            self.statistics[name].add(states)
            if self.n_raw_inputs:
                self._keep(name, states)
        if name.rpartition(".")[2] in READ_BY_LATER and tensor.dim() == 3:
            lengths = sample_lengths(tensor, keep)
            n_tokens = tensor.shape[0] * tensor.shape[1] if keep is None else len(keep)
            self.statistics[leader].emphasise(tensor[:, 0], lengths, n_tokens)
        self._last = "" if EXPERT.search(name) else name  # other tokens go to other experts

    def _keep(self, name: str, states: torch.Tensor) -> None:
        """Keep some inputs of every batch, evenly spaced, until there are enough."""
        flat = states.reshape(-1, states.shape[-1])
        before = self.raw_inputs.get(name, flat[:0])
        missing = min(self.n_raw_inputs - len(before), -(-self.n_raw_inputs // 4))
        if missing > 0 and len(flat):
            some = flat[:: -(-len(flat) // missing)]
            self.raw_inputs[name] = torch.cat((before, some))

    def _see_all(
        self, name: str, keep: Keep, module: Experts, inputs: Any, named: dict[str, Any]
    ) -> None:
        tensor = module.states(inputs, named)
        if name not in self.statistics:
            self.statistics[name] = Statistics.zeros(tensor.shape[-1], tensor.device)
        self.statistics[name].add(real(tensor, keep))


def common_input(name: str) -> tuple[str, str] | None:
    """What experts of a block have in common whose first layers read the router's input: the name
    of their list, and of the layer. None for other layers, whose inputs have nothing in common.
    """
    found, last = EXPERT.search(name), name.rpartition(".")[2]
    if found is None or not any(last in parts for parts in families.fused()):
        return None
    return name[: found.start()], name[found.end() :]


def _nothing(width: int, inputs: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of a linear's output, in the memory of one number."""
    return inputs.new_zeros(1).expand(*inputs.shape[:-1], width)
