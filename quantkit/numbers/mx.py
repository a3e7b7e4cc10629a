"""OCP's microscaling numbers: FP4 or FP8 with one power of two per 32 weights.

A scale is held as stored, as the byte 127 + exponent; 255 is NaN. For weights the largest
magnitude, rounded to a power of two (a mantissa of 1.75 or more rounds up), falls on the element's
largest power of two: 4 for FP4, 256 for FP8. So it may clip, by up to an eighth.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.numbers.fp4 import FP4
from quantkit.numbers.fp8 import FP8
from quantkit.numbers.number import Number

if TYPE_CHECKING:
    import torch

SIZE = 32
NAN = 255
NAN_BITS = 0x7FC00000
SMALLEST = 0x00400000
"""The bits of 2^-127, which is subnormal in float32."""
NEAR = range(-1, 2)
"""Exponents that a search tries, relative to the one given by the largest weight."""
LIMITS = 0, NAN - 1
"""Bytes of the smallest and the largest scale."""


@dataclass(frozen=True)
class MX(Number):
    """Scales, shared by both."""

    @property
    def scale_file_type(self) -> str | None:
        return "U8"

    @property
    def exponent(self) -> int:
        """Exponent of the element's largest power of two."""
        return 2 if self.bits == 4 else 8

    def scale(self, largest: "torch.Tensor", global_scale: "torch.Tensor | None") -> "torch.Tensor":
        import torch

        bits = largest.float().contiguous().view(torch.int32)
        power = (bits + (1 << 21)).bitwise_right_shift(23)  # a float32's own biased exponent
        return (power - self.exponent).clamp_(0, NAN - 1).to(torch.uint8)

    def steps(self, scale: "torch.Tensor", global_scale: "torch.Tensor | None") -> "torch.Tensor":
        import torch

        bits = scale.to(torch.int32).bitwise_left_shift_(23)  # a float32's own exponent
        bits.masked_fill_(scale == 0, SMALLEST).masked_fill_(scale == NAN, NAN_BITS)
        return bits.view(torch.float32)

    def nearest_scale(
        self, step: "torch.Tensor", like: "torch.Tensor", global_scale: "torch.Tensor | None"
    ) -> "torch.Tensor":
        """Halfway between powers of two is 1.5 times the lower one."""
        import torch

        mantissa, exponent = torch.frexp(step)  # from 0.5 to 1
        power = exponent + 126 + (mantissa > 0.75).to(exponent.dtype)
        stored = power.clamp(0, NAN - 1).to(torch.uint8)
        return torch.where(step > 0, stored, like)

    @property
    def search(self) -> tuple[range, tuple[int, int]]:
        return NEAR, LIMITS

    def near(self, scale: "torch.Tensor") -> "list[torch.Tensor]":
        import torch

        power = scale.to(torch.int16)
        return [(power + step).clamp_(*LIMITS).to(torch.uint8) for step in NEAR]


@dataclass(frozen=True)
class MXFP4(MX, FP4):
    """FP4 codes."""

    bits: int = 4

    @property
    def words(self) -> str:
        return "MXFP4 (E2M1 with powers of two as scales)"

    @property
    def tag(self) -> str:
        return "mxfp4"

    def activation_scale(self, largest: "torch.Tensor") -> "torch.Tensor":
        """vLLM's kernels use the same rule as for weights."""
        return self.steps(self.scale(largest, None), None)


@dataclass(frozen=True)
class MXFP8(MX, FP8):
    """FP8 in E4M3."""

    bits: int = 8

    @property
    def words(self) -> str:
        return "MXFP8 (E4M3 with powers of two as scales)"

    @property
    def tag(self) -> str:
        return "mxfp8"

    def activation_scale(self, largest: "torch.Tensor") -> "torch.Tensor":
        """vLLM's kernels round up, so nothing is clipped."""
        import torch

        bits = (largest / self.activation_top).contiguous().view(torch.int32)
        power = (bits + ((1 << 23) - 1)).bitwise_right_shift_(23).clamp_(0, NAN - 1)
        return self.steps(power.to(torch.uint8), None)
