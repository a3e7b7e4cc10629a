"""The numbers that weights, activations and caches are rounded to: one module each.

A number knows its limits, how to round to it, how its scale follows from a range, how far off its
rounding may be, and its names. `of` gives the number of a scheme, weight's or activation's.
"""

from typing import Protocol

from quantkit.numbers.fp8 import FP8
from quantkit.numbers.integers import Integer
from quantkit.numbers.number import Number as Number


class Scheme(Protocol):
    """What a number is told by, in the words of compressed-tensors."""

    @property
    def type(self) -> str: ...
    @property
    def num_bits(self) -> int: ...


def of(scheme: Scheme) -> Number:
    """The number that a scheme rounds to."""
    return FP8() if scheme.type == "float" else Integer(scheme.num_bits)
