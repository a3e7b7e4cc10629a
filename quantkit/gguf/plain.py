"""The plain GGUF types, equal to ggml's: blocks of 32 numbers with one scale each.

Q4_0 and Q5_0 are symmetric, Q4_1 and Q5_1 add a minimum, Q8_0 has eight bits. Without importance
the range of a block decides. With importance a few scales are tried, and an error is weighted by
the importance of its column, and more for a large number than for one that is small for its row.
"""

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import search

BLOCK = 32


def q8_0(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Eight bits and a scale; importance has no effect."""
    blocks = search.planes(x, BLOCK)
    scale = search.divide(blocks.abs().amax(0), 127)
    values = _finite(_round_away(blocks * search.divide_or_zero(1, scale)))
    return search.join(search.half_bytes(scale), values.to(torch.int8).view(torch.uint8))


def q4_0(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Four bits around zero and a scale."""
    scale, levels = _symmetric(x, importance, half=8)
    return search.join(search.half_bytes(scale), search.pack(levels, 4))


def q5_0(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Five bits around zero and a scale; the fifth bits are stored together."""
    scale, levels = _symmetric(x, importance, half=16)
    return search.join(search.half_bytes(scale), *_four_and_one(levels))


def q4_1(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Four bits, a scale and a minimum."""
    scale, low, levels = _affine(x, importance, top=15)
    return search.join(search.half_bytes(scale), search.half_bytes(low), search.pack(levels, 4))


def q5_1(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Five bits, a scale and a minimum."""
    scale, low, levels = _affine(x, importance, top=31)
    return search.join(search.half_bytes(scale), search.half_bytes(low), *_four_and_one(levels))


KINDS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    GGMLQuantizationType.Q8_0: q8_0,
    GGMLQuantizationType.Q4_0: q4_0,
    GGMLQuantizationType.Q5_0: q5_0,
    GGMLQuantizationType.Q4_1: q4_1,
    GGMLQuantizationType.Q5_1: q5_1,
}


def _symmetric(
    x: torch.Tensor, importance: torch.Tensor | None, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and levels; x is (level - half) * scale."""
    blocks = search.planes(x, BLOCK)
    if importance is not None:
        scale, levels = search.fit_symmetric(blocks, _weights(x, blocks, importance), half)
        return scale, levels.to(torch.uint8)
    scale = search.divide(search.extreme(blocks), -half)
    levels = _finite(blocks * search.divide_or_zero(1, scale) + (half + 0.5))
    return scale, levels.clamp_(max=2 * half - 1).to(torch.uint8)


def _affine(
    x: torch.Tensor, importance: torch.Tensor | None, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales, minima and levels; x is level * scale + minimum."""
    blocks = search.planes(x, BLOCK)
    if importance is not None:
        factors = search.candidates(range(37), 0.05, -0.9, top)
        weights = _weights(x, blocks, importance)
        scale, low, levels = search.fit_affine(blocks, weights, top, factors)
        return scale, low, levels.to(torch.uint8)
    low, high = search.limits(blocks)
    scale = search.divide(high - low, top)
    levels = _finite((blocks - low) * search.divide_or_zero(1, scale) + 0.5)
    return scale, low, levels.clamp_(max=top).to(torch.uint8)


def _four_and_one(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Five-bit levels as bytes of the fifth bits and bytes of the lower four."""
    return search.pack(levels >> 4, 1, 4), search.pack(levels & 15, 4)


def _weights(x: torch.Tensor, blocks: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    mean = search.divide(search.ordered_sum((x * x).T.contiguous()), x.shape[1])
    return search.search_weights(blocks, search.planes(importance[None], BLOCK), mean[:, None])


def _round_away(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integer, halves away from zero."""
    whole = x.trunc()
    return whole + x.sign() * ((x - whole).abs() >= 0.5)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Replace NaN and infinity by zero: the inverse of the smallest scales is infinite."""
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
