"""MoE experts as separate linear layers, by the names that checkpoints give them.

transformers holds all experts of a block in two tensors and multiplies with slices of them. Layers
can be loaded, rounded and observed one by one, so a model that quantkit runs has those instead.
What happens between the layers (a clamp, an activation with one added) stays the family's own code.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quantkit.errors import SourceError

LEAST_SHARE = 64
"""While calibrating, every expert sees at least one in this many tokens, even where its router
sends fewer: an expert that calibration never reaches would be rounded blindly, and may be reached
in serving.
"""


@dataclass(frozen=True)
class Fused:
    """All experts of a block as transformers holds them."""

    module: Any
    n_experts: int
    width: int
    inner: int
    gated: bool
    biased: bool
    alternating: bool
    """Rows of gate and up are interleaved."""

    @classmethod
    def of(cls, module: nn.Module) -> "Fused | None":
        """The fused experts of a module, recognised by their parameters; None for other modules."""
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 3}
        first = own.get("gate_up_proj", own.get("up_proj"))
        down = own.get("down_proj")
        if first is None or down is None:
            return None
        gated = "gate_up_proj" in own
        n_parts = 2 if gated else 1
        n_experts, height, width = first.shape
        transposed = (height, width) != (n_parts * down.shape[2], down.shape[1])
        if transposed:
            height, width = width, height
        return cls(
            module,
            n_experts,
            width,
            height // n_parts,
            gated,
            any(n.endswith("_bias") for n, _ in module.named_parameters(recurse=False)),
            not getattr(module, "is_concatenated", True),
        )


def fused(model: nn.Module) -> dict[str, Fused]:
    """Every block's experts, by the name of their module."""
    found = ((name, Fused.of(module)) for name, module in model.named_modules())
    return {name: experts for name, experts in found if experts is not None}


class Expert(nn.Module):
    """The layers of one expert."""

    def __init__(self, experts: Fused) -> None:
        super().__init__()
        down = experts.module.down_proj
        kind: dict[str, Any] = {"bias": experts.biased, "dtype": down.dtype, "device": down.device}
        if experts.gated:
            self.gate_proj = nn.Linear(experts.width, experts.inner, **kind)
        self.up_proj = nn.Linear(experts.width, experts.inner, **kind)
        self.down_proj = nn.Linear(experts.inner, experts.width, **kind)


@dataclass(frozen=True)
class _Shell:
    """Holds a module without registering it as a submodule."""

    module: Any


class Experts(nn.Module):
    """Replaces transformers' own experts, with the same arguments and result."""

    def __init__(self, experts: Fused, arguments: Sequence[str]) -> None:
        super().__init__()
        self.is_routed = len(arguments) == 3
        """Whether each token comes with its experts; otherwise every expert has its own rows."""
        self._arguments = tuple(arguments)
        self.gated, self.alternating = experts.gated, experts.alternating
        self.n_experts = experts.n_experts
        # The family's own code between the layers, without its weights.
        shell = object.__new__(type(experts.module))
        shell.__dict__.update(experts.module.__dict__)
        shell.__dict__["_parameters"] = {}
        self._own = _Shell(shell)
        for index in range(experts.n_experts):
            self.add_module(str(index), Expert(experts))
        self.is_watched = False
        self.real: torch.Tensor | None = None
        """While observing, positions of tokens that are not padding; None if none is padding."""

    def forward(self, *values: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self._arguments, values, strict=False)) | named
        states, *routing = (given[name] for name in self._arguments)
        flat = states.reshape(-1, states.shape[-1])
        if self.is_routed:
            index, weights = (part.reshape(len(flat), -1) for part in routing)
            return self._routed(flat, index, weights).view(states.shape)
        return self._in_rows(flat).view(states.shape)

    def states(self, values: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor:
        """The tokens of a call as [positions, width], each once."""
        given = dict(zip(self._arguments, values, strict=False)) | dict(named)
        states: torch.Tensor = given[self._arguments[0]]
        if not self.is_routed:  # every token occurs once per expert, zero except for its own
            states = states.view(self.n_experts, -1, states.shape[-1]).sum(0)
        return states.reshape(-1, states.shape[-1])

    def is_linear_in_up(self) -> bool:
        """Whether the down projection's input scales linearly with the up projection, at
        any size.
        """
        if not self.gated:
            return False
        generator = torch.Generator().manual_seed(0)
        gate = torch.randn(64, 8, generator=generator) * 8
        sizes = torch.linspace(-8, 24, 64).exp2()[:, None]  # beyond every clamp
        up = torch.randn(64, 8, generator=generator) * sizes
        once, twice = (self._inner(gate, scaled) for scaled in (up, 2 * up))
        return torch.equal(2 * once, twice)

    def expert(self, index: int) -> Expert:
        return cast("Expert", self.get_submodule(str(index)))

    def _run(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        expert = self.expert(index)
        if not self.gated:
            inner = self._own.module.act_fn(expert.up_proj(inputs))
            return cast("torch.Tensor", expert.down_proj(inner))
        inner = self._inner(expert.gate_proj(inputs), expert.up_proj(inputs))
        return cast("torch.Tensor", expert.down_proj(inner))

    def _inner(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What happens between the projections, by the family's own code."""
        own = self._own.module
        if not hasattr(own, "_apply_gate"):
            return cast("torch.Tensor", own.act_fn(gate) * up)
        both = torch.cat((gate, up), -1)
        if self.alternating:
            both = torch.stack((gate, up), -1).flatten(-2)
        return cast("torch.Tensor", own._apply_gate(both))

    def _routed(
        self, states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(states)
        if self.real is not None:  # the result for padding does not matter
            padded = torch.ones(len(index), dtype=torch.bool, device=index.device)
            padded[self.real] = False
            index = index.masked_fill(padded[:, None], self.n_experts)
        # Sorted once, so that each expert's tokens lie together.
        flat = index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.n_experts + 1)[: self.n_experts].tolist()
        tokens = order.div(index.shape[1], rounding_mode="floor")
        factors = weights.flatten()[order, None]
        start = 0
        for place, n_tokens in enumerate(counts):
            mine = tokens[start : start + n_tokens]
            inputs = states[mine]
            if self.is_watched:
                inputs = torch.cat([inputs, states[self._others(n_tokens, states)]])
            if len(inputs):
                outputs = self._run(place, inputs)[:n_tokens]
                outputs = outputs * factors[start : start + n_tokens]
                result.index_add_(0, mine, outputs.to(result.dtype))
            start += n_tokens
        return result

    def _others(self, n_tokens: int, states: torch.Tensor) -> torch.Tensor:
        """Positions of tokens that an expert sees in addition to its own, evenly spaced."""
        places = self.real
        if places is None:
            places = torch.arange(len(states), device=states.device)
        n_missing = max(0, -(-len(places) // LEAST_SHARE) - n_tokens)
        return places[torch.arange(n_missing, device=places.device) * LEAST_SHARE]

    def _in_rows(self, states: torch.Tensor) -> torch.Tensor:
        """As Llama 4 calls its experts: all tokens for each, zero where they are not routed
        to it.
        """
        by_expert = states.view(self.n_experts, -1, states.shape[-1])
        result = torch.zeros_like(by_expert)
        everybody = by_expert.sum(0) if self.is_watched else None
        for place in range(self.n_experts):
            mine = by_expert[place].any(-1).nonzero().flatten()
            inputs = by_expert[place, mine]
            if everybody is not None:
                inputs = torch.cat([inputs, everybody[self._others(len(mine), everybody)]])
            if len(inputs):
                result[place, mine] = self._run(place, inputs)[: len(mine)]
        return result.view(states.shape)


class Stack(nn.Module):
    """Several linear layers stacked, where transformers has a single one."""

    def __init__(self, linear: nn.Linear, parts: Sequence[str]) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        kind: dict[str, Any] = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        for part in parts:
            self.add_module(part, nn.Linear(columns, rows // len(parts), bias=False, **kind))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(inputs) for part in self.children()], -1)


class _Brought:
    """Experts of code that a model brings, each a module: who is called, and with what."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = list(experts.children())
        self._called: set[int] = set()
        self._rows: list[torch.Tensor] = []
        self._handles = [
            expert.register_forward_pre_hook(partial(self._see, index), with_kwargs=True)
            for index, expert in enumerate(self._experts)
        ]

    def _see(self, index: int, module: nn.Module, values: Any, named: dict[str, Any]) -> None:
        self._called.add(index)
        if len(values) == 1 and not named and torch.is_tensor(values[0]):
            self._rows.append(values[0].reshape(-1, values[0].shape[-1])[::LEAST_SHARE])

    def meet_the_others(self) -> None:
        """Call experts that no token went to with some tokens of those that were called."""
        left = [e for index, e in enumerate(self._experts) if index not in self._called]
        if left and self._rows:
            rows = torch.cat(self._rows)
            for expert in left:
                expert(rows)

    def let_go(self) -> None:
        for handle in self._handles:
            handle.remove()


def _is_list(name: str, module: nn.Module) -> bool:
    """Whether a module is a list of experts, none of them fused."""
    return name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList)


@contextmanager
def watched(block: nn.Module, real: torch.Tensor | None) -> Iterator[None]:
    """Let every expert of a block see some tokens, and none of them padding."""
    found = [module for module in block.modules() if isinstance(module, Experts)]
    lists = [_Brought(module) for name, module in block.named_modules() if _is_list(name, module)]
    for module in found:
        module.is_watched, module.real = True, real
    try:
        yield
        for brought in lists:
            brought.meet_the_others()
    finally:
        for brought in lists:
            brought.let_go()
        for module in found:
            module.is_watched, module.real = False, None


def separate(model: nn.Module, folder: Path) -> int:
    """Give every expert its own layers; returns how many blocks had experts."""
    found = fused(model)
    for name, experts in found.items():
        arguments = list(inspect.signature(experts.module.forward).parameters)
        if len(arguments) not in (1, 3):
            raise SourceError(
                f"{folder}: experts of {type(experts.module).__name__} are called with "
                f"{', '.join(arguments)}, which quantkit does not know; it takes experts that get "
                "hidden states, their indices and their weights"
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Experts(experts, arguments))
    return len(found)


def stack(model: nn.Module, stacked: dict[str, tuple[str, ...]]) -> None:
    """Split linear layers whose rows are stored as several tensors."""
    for name, parts in stacked.items():
        parent, _, last = name.rpartition(".")
        linear = cast("nn.Linear", model.get_submodule(name))
        setattr(model.get_submodule(parent), last, Stack(linear, parts))
