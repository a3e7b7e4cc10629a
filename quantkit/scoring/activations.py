"""Rounds inputs, keys and values as the serving engine will, so that scores include that error."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from quantkit.grid import FP8, widen
from quantkit.model.architecture import attentions
from quantkit.onepass import kvcache
from quantkit.recipe import ActivationScheme


def attach(
    model: torch.nn.Module,
    modules: list[str],
    scheme: ActivationScheme,
    static: Mapping[str, torch.Tensor],
) -> None:
    """Make the named linear layers of a model see rounded inputs; `static` holds fixed scales."""

    def dynamic(module: torch.nn.Module, inputs: Any) -> Any:
        return (round_per_token(inputs[0], scheme), *inputs[1:])

    def fixed(scale: torch.Tensor, module: torch.nn.Module, inputs: Any) -> Any:
        return (round_with(inputs[0], scale, scheme.type), *inputs[1:])

    for name in modules:
        hook = dynamic if scheme.dynamic else partial(fixed, static[name])
        model.get_submodule(name).register_forward_pre_hook(hook)


def attach_to_cache(model: torch.nn.Module, scales: Mapping[str, torch.Tensor]) -> None:
    """Make attention see keys and values as an FP8 cache with these scales gives them back."""

    def rounded(
        scale: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return round_with(keys, scale[0], "float"), round_with(values, scale[1], "float")

    for name, attention in attentions(model).items():
        scale = scales[f"{name}.k_scale"], scales[f"{name}.v_scale"]
        kvcache.intercept(attention, partial(rounded, scale))


def round_per_token(values: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Quantise and dequantise with one scale for each token, as vLLM's dynamic kernels do.

    With groups, each 128 channels of a token have their own.
    """
    size = scheme.group_size or values.shape[-1]
    parts = values.reshape(*values.shape[:-1], -1, size)
    largest = parts.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    scale = largest / (448.0 if scheme.type == "float" else 127.0)
    return round_with(parts, scale, scheme.type).reshape(values.shape)


def round_with(
    values: torch.Tensor, scale: torch.Tensor, kind: Literal["int", "float"]
) -> torch.Tensor:
    """Quantise and dequantise with given scales."""
    scaled = values.float() / scale.to(values.device).float()
    if kind == "float":
        rounded = widen(scaled.clamp_(-448.0, 448.0).to(FP8))
    else:
        rounded = scaled.round_().clamp_(-128.0, 127.0)
    return rounded.mul_(scale.to(values.device).float()).to(values.dtype)
