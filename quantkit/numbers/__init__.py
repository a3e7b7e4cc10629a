"""The number formats that weights, activations and caches are rounded to: one module each.

A number knows its limits, how to round to it, how its scale follows from a range, how large its
rounding error may be, and its names. `of` returns the number of a weight or activation scheme.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Plain:
    """A scheme that no recipe has declared, such as one from another tool's config."""

    type: str
    num_bits: int
    strategy: str = ""
    group_size: int | None = None


def of(scheme: Scheme) -> Number:
    """The number that a scheme rounds to."""
    if scheme.type == "int":
        return Integer(scheme.num_bits)
    if scheme.num_bits == 4:
        return NVFP4() if scheme.strategy == "tensor_group" else MXFP4()
    return MXFP8() if scheme.strategy == "group" and scheme.group_size == mx.SIZE else FP8()


def label(
    weights: Scheme, inputs: Scheme | None, symmetric: bool = True, static: bool = False
) -> str:
    """The short label of a layer's numbers, such as `W4A16 g128`, `FP8 per channel` or `NVFP4`.

    `static`: activation scales are stored.
    """
    number = of(weights)
    name, size = number.tag.upper(), weights.group_size
    if weights.type == "int":
        held = "16" if inputs is None else "FP8" if inputs.type == "float" else inputs.num_bits
        name = f"W{weights.num_bits}A{held}"
    elif inputs is None:
        name += "-A16"
    elif of(inputs).bits != number.bits:
        name += f"-A{of(inputs).tag.upper()}"
    share = ""
    if not number.has_own_scales:
        grouped = "blocks" if weights.strategy == "block" else f"per {weights.strategy}"
        share = f" g{size}" if size else f" {grouped}"
    zero = "" if symmetric else " asymmetric"
    return f"{name}{share}{zero}{', static activations' * static}"
