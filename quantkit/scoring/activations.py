"""Rounds inputs, keys and values as the serving engine will, so that scores include that error."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from quantkit.model.skeleton import attentions
from quantkit.numbers.activations import round_inputs
from quantkit.numbers.fp8 import FP8
from quantkit.onepass import kvcache
from quantkit.recipe import ActivationScheme


def attach(linear: torch.nn.Module, scheme: ActivationScheme, stored: torch.Tensor | None) -> None:
    """Make a linear layer see rounded inputs; `stored` is its static scale, if it has one."""

    def rounded(module: torch.nn.Module, inputs: Any) -> Any:
        return (round_inputs(inputs[0], scheme, stored), *inputs[1:])

    linear.register_forward_pre_hook(rounded)


def attach_to_cache(model: torch.nn.Module, scales: Mapping[str, torch.Tensor]) -> None:
    """Make attention see keys and values as an FP8 cache with these scales returns them."""

    def rounded(
        scale: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return FP8().rounded(keys, scale[0]), FP8().rounded(values, scale[1])

    for name, attention in attentions(model).items():
        if f"{name}.k_scale" not in scales:
            continue  # a tower's attention, which has no cache
        scale = scales[f"{name}.k_scale"], scales[f"{name}.v_scale"]
        kvcache.intercept(attention, partial(rounded, scale))
