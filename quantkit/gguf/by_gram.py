"""K-quants by GPTQ: llama.cpp's scales, and levels chosen by the Gram matrix of the inputs.

llama.cpp's quantiser weighs each input by its mean square, the diagonal of the Gram matrix, and
rounds every weight on its own. Here the scales and minima are those that it finds, and the levels
are GPTQ's: each column compensates for the errors of the columns before it. Two sweeps then move
each level in turn to the best one given all others. The file is a plain one of the same size. Each
row keeps the levels with the smallest error of its output, llama.cpp's own if need be.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import blocks, kquants, values
from quantkit.gguf.plan import GGUFPlan
from quantkit.gguf.tensors import GGUFTensor
from quantkit.methods import gptq, products, refine
from quantkit.methods.columns import Factor
from quantkit.methods.statistics import Statistics

KINDS = frozenset(kquants.LEVELS)
"""Types whose levels GPTQ can choose."""
SWEEPS = 2
TINY = 1e-20
"""Stands for a scale of zero, by which nothing can be divided: all its levels mean the same."""


def chosen(plan: GGUFPlan) -> dict[str, list[GGUFTensor]]:
    """Tensors whose levels GPTQ chooses, by the linears that they hold, in part or as a whole."""
    found: dict[str, list[GGUFTensor]] = {}
    for tensor in plan.layout.tensors:
        if tensor.module is not None and plan.kinds[tensor.name] in KINDS:
            for part in tensor.parts:
                found.setdefault(part.removesuffix(".weight"), []).append(tensor)
    return found


@dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of linears that share them."""

    importance: torch.Tensor
    """Mean squares, by which llama.cpp's search weighs."""
    gram: torch.Tensor
    halves: products.Halves
    factor: Factor | None
    """None where the matrix does not factor: levels stay as llama.cpp would have them."""

    @classmethod
    def of(cls, statistics: Statistics) -> "Inputs":
        gram = statistics.gram
        importance = gram.diagonal() / max(1, statistics.n_tokens)
        enough = statistics.n_tokens >= gptq.ENOUGH * len(gram)
        factor = gptq.factor(gram) if enough else None
        return cls(importance.contiguous(), gram, products.Halves.of(gram), factor)


@dataclass(frozen=True)
class Solved:
    """A weight as bytes, and what that costs."""

    data: torch.Tensor
    """uint8 [rows, bytes of a row]."""
    sums: tuple[float, float, float, float]
    """Squares of the weight's change, of the weight, of the output's error on calibration data, and
    of that output."""
    damping: float | None
    """What GPTQ added to the Gram matrix's diagonal, relative to its mean; None where it could not
    be applied, so that all levels are llama.cpp's."""


@torch.no_grad()
def quantize(weight: torch.Tensor, kind: GGMLQuantizationType, inputs: Inputs) -> Solved:
    """A weight [rows, columns] as K-quants of the least output error."""
    weight = weight.float()
    data = blocks.quantize(weight, kind, inputs.importance)
    change = values.dequantize(data, kind).sub_(weight)
    errors = products.row_energies(change, inputs.halves)
    for levels in _better(weight, kind, data, inputs):
        other = kquants.with_levels(data, kind, levels)
        moved = values.dequantize(other, kind).sub_(weight)
        found = products.row_energies(moved, inputs.halves)
        gains = found < errors
        data = torch.where(gains[:, None], other, data)
        change = torch.where(gains[:, None], moved, change)
        errors = torch.where(gains, found, errors)
    output = products.row_energies(weight, inputs.halves, exactly=False)
    parts = change.square(), weight.square(), errors, output
    first, second, third, fourth = torch.stack([part.sum() for part in parts]).tolist()
    damping = inputs.factor.damping if inputs.factor else None
    return Solved(data.cpu(), (first, second, third, fourth), damping)


def _better(
    weight: torch.Tensor, kind: GGMLQuantizationType, data: torch.Tensor, inputs: Inputs
) -> Iterator[torch.Tensor]:
    """Levels on the grids that blocks have, uint8 [rows, columns]: GPTQ's, and those after sweeps
    over them.
    """
    if inputs.factor is None:
        return
    place = kquants.LEVELS[kind]
    scale, low = values.steps(data, kind)
    scale = torch.where(scale == 0, TINY, scale)
    limits = -float(place.zero), float(place.top - place.zero)
    codes = gptq.codes(weight, inputs.factor, scale, low / scale, limits).to(torch.int8)
    levels = (codes.int() + place.zero).to(torch.uint8)
    yield levels
    change = values.dequantize(kquants.with_levels(data, kind, levels), kind).sub_(weight)
    refine.sweep_codes(change, codes, scale, limits, inputs.gram, inputs.halves, SWEEPS)
    yield (codes.int() + place.zero).to(torch.uint8)
