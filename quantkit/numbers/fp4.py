"""FP4 in E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives.

A number is held as its code, one per byte: the index of the magnitude in that list, and the sign in
bit 3. Ties go to the even code. It is not used on its own: its scales are NVFP4's or MX's.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.numbers.number import Float

if TYPE_CHECKING:
    import torch

TOP = 6.0


@dataclass(frozen=True)
class FP4(Float):
    """E2M1 codes in bytes."""

    bits: int = 4

    @property
    def file_type(self) -> str:
        return "U8"

    @property
    def top(self) -> float:
        return TOP

    @property
    @abstractmethod
    def search(self) -> tuple[range, tuple[int, int]]:
        """Stored scales to try: steps from the given scale's code, and which codes exist."""

    @property
    def max_relative_error(self) -> float:
        """Rounding a bell-shaped weight moves it by 0.1 (NVFP4) or 0.12 (MXFP4)."""
        return 0.5

    def round(self, scaled: "torch.Tensor") -> "torch.Tensor":
        import torch

        sign = (scaled < 0).to(torch.uint8).bitwise_left_shift_(3)
        size = scaled.abs_().clamp_(max=TOP)
        # Steps of 0.5 up to 2, of 1 up to 4, of 2 beyond; the smallest of the three is the right
        # one.
        code = torch.minimum((2 * size).round_(), size.round().add_(2))
        code = torch.minimum(code, size.mul_(0.5).round_().add_(4))
        return code.to(torch.uint8).bitwise_or_(sign)

    def widen(self, values: "torch.Tensor") -> "torch.Tensor":
        """A code's bits, moved into the fields of a float16, represent the number over 2^14."""
        import torch

        bits = values.to(torch.int16)
        sign = (bits & 8).bitwise_left_shift_(12)
        return (bits & 7).bitwise_left_shift_(9).bitwise_or_(sign).view(
            torch.float16
        ).float() * 2**14
