"""Evenly spaced signed integers of any width up to 8 bits."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.numbers.number import Number

if TYPE_CHECKING:
    import torch

MAX_RELATIVE_ERROR = {8: 0.1, 7: 0.15, 6: 0.25, 5: 0.35, 4: 0.5, 3: 0.75, 2: 1.1}
"""Rounding a bell-shaped weight moves it by 0.01 (8 bits), 0.13 (4), 0.27 (3) or 0.7 (2) of its
norm; a swapped or scrambled one is off by about 1.4: the limits in between leave room for odd
distributions.
"""


@dataclass(frozen=True)
class Integer(Number):
    """Signed integers, held in int8."""

    @property
    def words(self) -> str:
        return f"{self.bits}-bit integers"

    @property
    def tag(self) -> str:
        return f"int{self.bits}"

    @property
    def file_type(self) -> str:
        return "I8"

    @property
    def limits(self) -> tuple[float, float]:
        half = 2 ** (self.bits - 1)
        return float(-half), float(half - 1)

    @property
    def activation_top(self) -> float:
        """vLLM divides by 127, where compressed-tensors divides by 127.5."""
        return self.limits[1]

    @property
    def max_relative_error(self) -> float:
        return MAX_RELATIVE_ERROR[self.bits]

    def round(self, scaled: "torch.Tensor") -> "torch.Tensor":
        import torch

        return scaled.clamp_(*self.limits).round_().to(torch.int8)

    def widen(self, values: "torch.Tensor") -> "torch.Tensor":
        return values.float()
