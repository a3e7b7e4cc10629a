"""Rounding of activations at run time, as the kernels of serving engines do it."""

from typing import TYPE_CHECKING, Protocol

from quantkit import numbers
from quantkit.numbers.fp4 import FP4

if TYPE_CHECKING:
    import torch


class Scheme(numbers.Scheme, Protocol):
    """What activations are rounded to, and what shares a scale."""

    @property
    def group_size(self) -> int | None: ...
    @property
    def is_static(self) -> bool: ...


def round_inputs(
    values: "torch.Tensor", scheme: Scheme, stored: "torch.Tensor | None" = None
) -> "torch.Tensor":
    """Quantise and dequantise the inputs of a layer; `stored` is its static scale.

    Dynamic scales are per token, or per `group_size` channels of a token.
    """
    number = numbers.of(scheme)
    size = scheme.group_size or values.shape[-1]
    if values.device.type == "cuda" and isinstance(number, FP4):
        from quantkit.numbers import kernels

        return kernels.round_inputs(values, size, stored)
    parts = values.reshape(*values.shape[:-1], -1, size)
    scale = stored
    if not scheme.is_static:
        largest = parts.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
        scale = number.activation_scale(largest)
    assert scale is not None
    return number.rounded(parts, scale).reshape(values.shape)
