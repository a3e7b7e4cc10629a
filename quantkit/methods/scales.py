"""Scales by search: for every tile the one with the smallest output error.

With G the Gram matrix of the inputs and d a row's change within one tile, d G_tile d^T is that
tile's own share of the output's squared error. Candidates are the storable scales around the one
given by the largest weight; for NVFP4 these include those that make 4, not 6, the code of the
largest weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit import grid, numbers
from quantkit.methods import products, rounding
from quantkit.numbers import channel_scales
from quantkit.numbers.fp4 import FP4

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.methods.contract import Linears

ROWS = 4096
"""Rows judged at a time, which bounds the memory."""


def global_scale(linears: Linears) -> torch.Tensor | None:
    """A tensor's global scale, shared with those that engines fuse; None for most numbers."""
    number = numbers.of(linears.scheme)
    if not number.has_global_scale:
        return None
    largest = linears.largest
    if largest is None:
        largest = linears.weight.abs().amax().to(linears.dtype)
    return number.global_scale(largest)


def searched(linears: Linears) -> torch.Tensor:
    """The best scale of every tile, for symmetric numbers with their own kind of scale."""
    weight, scheme, whole = linears.weight, linears.scheme, global_scale(linears)
    number = numbers.of(scheme)
    view = grid.tiles(weight, scheme)
    low, high = view.amin(-1).to(linears.dtype), view.amax(-1).to(linears.dtype)
    scale, _ = grid.parameters(low, high, scheme, linears.scale_dtype, whole)
    if number.has_own_scales and weight.device.type == "cuda" and isinstance(number, FP4):
        from quantkit.methods.kernels import fp4_scales

        grams = tile_grams(linears.inputs.gram, view.shape[-1])
        return fp4_scales.search(weight, grams, scale, whole, *number.search)
    if number.has_own_scales:
        return best(linears, number.near(scale), whole)
    clipped = [(scale.float() * ratio).to(linears.dtype) for ratio in (1.0, *rounding.CLIP_RATIOS)]
    scale = best(linears, clipped, whole)
    if channel_scales.apply_to(scheme, linears.activations):
        return best(linears, channel_scales.near(scale, linears.dtype), whole)
    return scale


def best(
    linears: Linears, candidates: Sequence[torch.Tensor], whole: torch.Tensor | None
) -> torch.Tensor:
    """For every tile the candidate with the smallest error; the first on ties."""
    scheme = linears.scheme
    grams = tile_grams(linears.inputs.gram, grid.tiles(linears.weight[:1], scheme).shape[-1])
    found = torch.empty_like(candidates[0])
    for start in range(0, linears.weight.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        part = linears.weight[rows]
        least: torch.Tensor | None = None
        for scale in candidates:
            moved = grid.dequantize(grid.quantize(part, scale[rows], None, scheme, whole), scheme)
            tiles = grid.tiles(moved.sub_(part), scheme).transpose(0, 1)
            error = products.tile_energies(tiles, grams).t()
            if least is None:
                least, found[rows] = error, scale[rows]
                continue
            better = error < least
            least = torch.where(better, error, least)
            # As bytes: torch cannot select among 8-bit numbers.
            kind = torch.uint8 if scale.element_size() == 1 else scale.dtype
            kept = torch.where(better, scale[rows].view(kind), found[rows].view(kind))
            found[rows] = kept.view(scale.dtype)
    return found


def tile_grams(gram: torch.Tensor, size: int) -> torch.Tensor:
    """The diagonal blocks [tiles, size, size]."""
    n_tiles = gram.shape[0] // size
    blocks = gram.view(n_tiles, size, n_tiles, size)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
