"""FP8 in E4M3: 4 bits of exponent, 3 of mantissa, no infinity."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.numbers.number import Float

if TYPE_CHECKING:
    import torch

TOP = 448.0


@dataclass(frozen=True)
class FP8(Float):
    """E4M3, held in torch's own dtype."""

    bits: int = 8

    @property
    def words(self) -> str:
        return "FP8 (E4M3)"

    @property
    def tag(self) -> str:
        return "fp8"

    @property
    def file_type(self) -> str:
        return "F8_E4M3"

    @property
    def top(self) -> float:
        return TOP

    @property
    def max_relative_error(self) -> float:
        """Rounding a bell-shaped weight moves it by 0.03."""
        return 0.1

    def round(self, scaled: "torch.Tensor") -> "torch.Tensor":
        import torch

        return scaled.clamp_(-TOP, TOP).to(torch.float8_e4m3fn)

    def widen(self, values: "torch.Tensor") -> "torch.Tensor":
        """Exact except for NaN, which `has_nan` looks for.

        On a CPU torch converts FP8 to float32 one by one. Moved into the fields of a float16, whose
        exponent bias is larger by 8, the same bits represent the number over 256: five times as
        fast.
        """
        import torch

        if values.device.type != "cpu":
            return values.float()
        bits = values.view(torch.int8).to(torch.int16)
        bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was extended into that bit
        return bits.view(torch.float16).float().mul_(256)

    def has_nan(self, values: "torch.Tensor") -> bool:
        import torch

        return bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())
