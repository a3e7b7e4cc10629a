"""Rounding of activations at run time, as the kernels of serving engines do it."""

from typing import TYPE_CHECKING, Protocol

from quantkit import numbers

if TYPE_CHECKING:
    import torch


class Scheme(numbers.Scheme, Protocol):
    """What activations are rounded to, and what shares a scale."""

    @property
    def group_size(self) -> int | None: ...


def round_dynamically(values: "torch.Tensor", scheme: Scheme) -> "torch.Tensor":
    """Quantise and dequantise with one scale for each token, as vLLM's dynamic kernels do.

    With groups, each `group_size` channels of a token have their own.
    """
    number = numbers.of(scheme)
    size = scheme.group_size or values.shape[-1]
    parts = values.reshape(*values.shape[:-1], -1, size)
    largest = parts.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    return number.rounded(parts, number.activation_scale(largest)).reshape(values.shape)
