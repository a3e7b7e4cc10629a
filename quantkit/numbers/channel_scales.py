"""Group scales as vLLM's kernel for 4-bit weights and FP8 activations stores them.

It rounds the scales of a row to E4M3 numbers times one float32 number, and those again after a
division by 8. Scales that already are such numbers survive it: with a row factor of 4 significant
bits the products have 8, so bfloat16 holds them exactly, and the largest scale of a row, 448 times
the factor, yields the factor again.
"""

from typing import TYPE_CHECKING, Protocol

from quantkit.numbers import fp8

if TYPE_CHECKING:
    import torch

SIZE = 128
SHIFT = 8.0
MOST = fp8.TOP / SHIFT
LEAST_FACTOR = 1 / (fp8.TOP * 512)
"""The kernel's own bound."""
NEAR = range(-2, 3)
"""Scales that a search tries, as steps of E4M3."""


class Typed(Protocol):
    """A scheme of weights or activations."""

    @property
    def type(self) -> str: ...


def apply_to(weights: Typed, activations: Typed | None) -> bool:
    """Whether a recipe's scales go through that kernel."""
    return weights.type == "int" and activations is not None and activations.type == "float"


def served(scale: "torch.Tensor") -> "torch.Tensor":
    """Stored scales [rows, groups] as the kernel uses them, in float32."""
    import torch

    wide = scale.float()
    factor = (wide.amax(-1, keepdim=True) / fp8.TOP).clamp(min=LEAST_FACTOR)
    kept = (wide / factor).clamp(max=fp8.TOP).to(torch.float8_e4m3fn).float()
    return (kept / SHIFT).to(torch.float8_e4m3fn).float() * (SHIFT * factor)


def factors(scale: "torch.Tensor") -> "torch.Tensor":
    """A factor per row, such that the row's largest scale is nearly 448 times that."""
    import torch

    mantissa, exponent = torch.frexp(scale.float().amax(-1, keepdim=True) / fp8.TOP)
    return torch.ldexp((mantissa * 16).round() / 16, exponent).clamp(min=LEAST_FACTOR)


def near(scale: "torch.Tensor", dtype: "torch.dtype") -> "list[torch.Tensor]":
    """Nearby scales that survive, the nearest first. A row's largest scale does not change."""
    import torch

    wide = scale.float()
    factor = factors(scale)
    code = (wide / (SHIFT * factor)).clamp(2**-9, MOST).to(torch.float8_e4m3fn)
    code = code.view(torch.uint8).to(torch.int16)
    top = torch.tensor(MOST).to(torch.float8_e4m3fn).view(torch.uint8).item()
    is_top = wide == wide.amax(-1, keepdim=True)
    found = []
    for step in sorted(NEAR, key=abs):
        kept = (code + step).clamp_(1, int(top)).masked_fill_(is_top, int(top)).to(torch.uint8)
        found.append((kept.view(torch.float8_e4m3fn).float() * (SHIFT * factor)).to(dtype))
    return found
