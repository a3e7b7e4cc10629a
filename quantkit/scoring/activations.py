"""Rounds inputs, keys and values as the serving engine will, so that scores include that error."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from quantkit import numbers
from quantkit.model.architecture import attentions
from quantkit.numbers.activations import round_dynamically
from quantkit.numbers.fp8 import FP8
from quantkit.onepass import kvcache
from quantkit.recipe import ActivationScheme


def attach(
    model: torch.nn.Module,
    modules: list[str],
    scheme: ActivationScheme,
    static: Mapping[str, torch.Tensor],
) -> None:
    """Make the named linear layers of a model see rounded inputs; `static` holds fixed scales."""
    number = numbers.of(scheme)

    def dynamic(module: torch.nn.Module, inputs: Any) -> Any:
        return (round_dynamically(inputs[0], scheme), *inputs[1:])

    def fixed(scale: torch.Tensor, module: torch.nn.Module, inputs: Any) -> Any:
        return (number.rounded(inputs[0], scale), *inputs[1:])

    for name in modules:
        hook = dynamic if scheme.dynamic else partial(fixed, static[name])
        model.get_submodule(name).register_forward_pre_hook(hook)


def attach_to_cache(model: torch.nn.Module, scales: Mapping[str, torch.Tensor]) -> None:
    """Make attention see keys and values as an FP8 cache with these scales gives them back."""

    def rounded(
        scale: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return FP8().rounded(keys, scale[0]), FP8().rounded(values, scale[1])

    for name, attention in attentions(model).items():
        if f"{name}.k_scale" not in scales:
            continue  # of a tower, which has no cache
        scale = scales[f"{name}.k_scale"], scales[f"{name}.v_scale"]
        kvcache.intercept(attention, partial(rounded, scale))
