"""The number formats that weights, activations and caches are rounded to: one module each.

A number knows its limits, how to round to it, how its scale follows from a range, how large its
rounding error may be, and its names. `of` returns the number of a weight or activation scheme.
"""

from typing import Protocol

from quantkit.numbers import mx
from quantkit.numbers.fp8 import FP8
from quantkit.numbers.integers import Integer
from quantkit.numbers.mx import MXFP4, MXFP8
from quantkit.numbers.number import Number as Number
from quantkit.numbers.nvfp4 import NVFP4


class Scheme(Protocol):
    """What identifies a number, in the terms of compressed-tensors."""

    @property
    def type(self) -> str: ...
    @property
    def num_bits(self) -> int: ...
    @property
    def strategy(self) -> str: ...
    @property
    def group_size(self) -> "int | str | None": ...


def of(scheme: Scheme) -> Number:
    """The number that a scheme rounds to."""
    if scheme.type == "int":
        return Integer(scheme.num_bits)
    if scheme.num_bits == 4:
        return NVFP4() if scheme.strategy == "tensor_group" else MXFP4()
    return MXFP8() if scheme.strategy == "group" and scheme.group_size == mx.SIZE else FP8()
