"""Experts of a mixture as linear layers of their own, by the names that checkpoints give them.

transformers holds all experts of a block in two tensors and multiplies with slices of them. Layers
can be loaded, rounded and watched one by one, so a model that is computed with has those instead.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from quantkit.errors import SourceError

ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
LEAST_SHARE = 64
"""While calibrating, one token of so many goes to every expert, also where its router sends fewer:
an expert that calibration never meets would be rounded blindly, and may be met in serving."""


class Expert(nn.Module):
    """A gated layer of one expert."""

    def __init__(self, width: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": False, "dtype": dtype, "device": device}
        self.gate_proj = nn.Linear(width, inner, **kind)
        self.up_proj = nn.Linear(width, inner, **kind)
        self.down_proj = nn.Linear(inner, width, **kind)


class Experts(nn.Module):
    """Takes the place of transformers' own, with the same arguments and result."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.act_fn = fused.act_fn
        n_experts, width, inner = fused.down_proj.shape
        for index in range(n_experts):
            expert = Expert(width, inner, fused.down_proj.dtype, fused.down_proj.device)
            self.add_module(str(index), expert)

        self.n_experts = n_experts
        self.is_watched = False
        self.real: torch.Tensor | None = None
        """While watched, the places of tokens that are no padding; None where all are."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        if self.real is not None:  # what becomes of padding matters to nobody
            padded = torch.ones(len(top_k_index), dtype=torch.bool, device=top_k_index.device)
            padded[self.real] = False
            top_k_index = top_k_index.masked_fill(padded[:, None], -1)
        for index in self._met(top_k_index):
            tokens, places = torch.where(top_k_index == index)
            inputs = hidden_states[tokens]
            if self.is_watched:
                inputs = torch.cat([inputs, hidden_states[self._others(len(tokens), result)]])
            expert = cast("Expert", self.get_submodule(str(index)))
            inner = self.act_fn(expert.gate_proj(inputs)) * expert.up_proj(inputs)
            outputs = expert.down_proj(inner)[: len(tokens)] * top_k_weights[tokens, places, None]
            result.index_add_(0, tokens, outputs.to(result.dtype))
        return result

    def _met(self, top_k_index: torch.Tensor) -> list[int]:
        """Experts that compute something."""
        if self.is_watched:
            return list(range(self.n_experts))
        counts = torch.bincount(top_k_index.flatten(), minlength=self.n_experts)
        return [index for index, n in enumerate(counts.tolist()) if n]

    def _others(self, n_tokens: int, states: torch.Tensor) -> torch.Tensor:
        """Places of tokens that an expert sees beside its own, evenly spread."""
        places = self.real
        if places is None:
            places = torch.arange(len(states), device=states.device)
        n_missing = max(0, -(-len(places) // LEAST_SHARE) - n_tokens)
        return places[torch.arange(n_missing, device=places.device) * LEAST_SHARE]


@contextmanager
def watched(block: nn.Module, real: torch.Tensor | None) -> Iterator[None]:
    """Let every expert of a block see something, and none of them padding."""
    found = [module for module in block.modules() if isinstance(module, Experts)]
    for module in found:
        module.is_watched, module.real = True, real
    try:
        yield
    finally:
        for module in found:
            module.is_watched, module.real = False, None


def separate(model: nn.Module, folder: Path) -> int:
    """Give every expert layers of its own; returns how many blocks had experts.

    `Architecture` has refused layouts other than gate and up above each other, then down.
    """
    fused = {
        name: module
        for name, module in model.named_modules()
        if all(
            getattr(getattr(module, p, None), "ndim", 0) == 3 for p in ("gate_up_proj", "down_proj")
        )
    }
    for name, module in fused.items():
        if list(inspect.signature(module.forward).parameters) != ARGUMENTS:
            raise SourceError(
                f"{folder}: experts of {type(module).__name__} are called in another way than "
                "quantkit knows; it cannot compute with this mixture"
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Experts(module))
    return len(fused)


def _is_fused(module: nn.Module) -> bool:
    parts = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(part, nn.Parameter) and part.ndim == 3 for part in parts)
