"""Experts of a mixture as linear layers of their own, by the names that checkpoints give them.

transformers holds all experts of a block in two tensors and multiplies with slices of them. Layers
can be loaded, rounded and watched one by one, so a model that is scored has those instead.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.errors import SourceError

ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


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

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            tokens, places = torch.where(top_k_index == index)
            expert, inputs = self.get_submodule(str(index)), hidden_states[tokens]
            inner = self.act_fn(expert.gate_proj(inputs)) * expert.up_proj(inputs)
            outputs = expert.down_proj(inner) * top_k_weights[tokens, places, None]
            result.index_add_(0, tokens, outputs.to(result.dtype))
        return result


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
