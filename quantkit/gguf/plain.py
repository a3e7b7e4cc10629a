"""The plain GGUF types, equal to ggml's: blocks of 32 numbers with one scale each.

Q4_0 and Q5_0 are symmetric, Q4_1 and Q5_1 add a minimum, Q8_0 is eight bits. Without importance
the range of a block decides. With it a few scales are tried, and an error weighs by the importance
of its column and more in a large number than in one that is small for its row.
"""

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import search

BLOCK = 32


def q8_0(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Eight bits and a scale; importance changes nothing."""
    blocks = search.planes(x, BLOCK)
    scale = search.divide(blocks.abs().amax(0), 127)
    values = _finite(_round_away(blocks * search.divide_or_zero(1, scale)))
    return search.join(search.half_bytes(scale), values.to(torch.int8).view(torch.uint8))


def q4_0(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Four bits around zero and a scale."""
    scale, levels = _symmetric(x, importance, half=8)
    return search.join(search.half_bytes(scale), search.pack_nibbles(levels))


def q5_0(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Five bits around zero and a scale; the fifth bits stand together."""
    scale, levels = _symmetric(x, importance, half=16)
    fifth = search.pack_bits(levels >= 16)
    return search.join(search.half_bytes(scale), fifth, search.pack_nibbles(levels))


def q4_1(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Four bits, a scale and a minimum."""
    scale, low, levels = _affine(x, importance, top=15)
    return search.join(
        search.half_bytes(scale), search.half_bytes(low), search.pack_nibbles(levels)
    )


def q5_1(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Five bits, a scale and a minimum."""
    scale, low, levels = _affine(x, importance, top=31)
    fifth = search.pack_bits(levels >= 16)
    return search.join(
        search.half_bytes(scale), search.half_bytes(low), fifth, search.pack_nibbles(levels)
    )


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
        return search.fit_symmetric(blocks, _weights(x, blocks, importance), half)
    scale = search.divide(search.extreme(blocks), -half)
    levels = _finite(blocks * search.divide_or_zero(1, scale) + (half + 0.5))
    return scale, levels.trunc_().clamp_(max=2 * half - 1)


def _affine(
    x: torch.Tensor, importance: torch.Tensor | None, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales, minima and levels; x is level * scale + minimum."""
    blocks = search.planes(x, BLOCK)
    if importance is not None:
        return fit_affine(blocks, _weights(x, blocks, importance), top)
    low, high = _range(blocks)
    scale = search.divide(high - low, top)
    levels = _finite((blocks - low) * search.divide_or_zero(1, scale) + 0.5)
    return scale, low, levels.trunc_().clamp_(max=top)


def fit_affine(
    x: torch.Tensor, weights: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scale, the minimum (never above zero) and the levels of 0 ... top of every block.

    Candidates stretch the range a little. Each rounds x to levels, a weighted line through these
    is the scale and the minimum, and the least weighted error stays. A minimum that is found
    replaces the old one for the candidates that follow.
    """
    low, high = _range(x)
    low = low.masked_fill_(low > 0, 0)
    empty = high <= low
    total = search.ordered_sum(weights)
    total_x = search.ordered_sum(weights * x)

    def rounded(inverse: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        # Where no range is left, or one too small for an inverse, all levels are zero.
        inverse = inverse.nan_to_num(posinf=0.0, neginf=0.0)
        return (x - low).mul_(inverse).round_().clamp_(0, top)

    def error(levels: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        return search.ordered_sum((scale * levels).add_(low).sub_(x).square_().mul_(weights))

    inverse, start = search.divide(top, high - low), low
    scale = search.divide(1, inverse)
    best = error(rounded(inverse, low), scale, low)
    for wanted in search.steps(0, 36, 0.05, -0.9, top):
        candidate = search.divide(wanted, high - low)
        levels = rounded(candidate, low)
        weighted = weights * levels
        sum_l = search.ordered_sum(weighted)
        sum_l2 = search.ordered_sum(weighted * levels)
        sum_xl = search.ordered_sum(weighted * x)
        determinant = total * sum_l2 - sum_l * sum_l
        slope = search.divide(total * sum_xl - total_x * sum_l, determinant)
        foot = search.divide(sum_l2 * total_x - sum_l * sum_xl, determinant)
        above = foot > 0
        slope = torch.where(above, search.divide(sum_xl, sum_l2), slope)
        foot = foot.masked_fill_(above, 0)
        found = error(levels, slope, foot)
        better = (determinant > 0) & (found < best)
        inverse, start = torch.where(better, candidate, inverse), torch.where(better, low, start)
        scale, low = torch.where(better, slope, scale), torch.where(better, foot, low)
        best = torch.where(better, found, best)
    levels = rounded(inverse, start)
    return scale.masked_fill_(empty, 0), low, levels.masked_fill_(empty, 0)


def _range(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equals the first: zero has two signs, and the minimum is stored with its own."""
    low, high = x.argmin(0, keepdim=True), x.argmax(0, keepdim=True)
    return x.gather(0, low)[0], x.gather(0, high)[0]


def _weights(x: torch.Tensor, blocks: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    mean = search.divide(search.ordered_sum((x * x).T.contiguous()), x.shape[1])
    return search.search_weights(blocks, search.planes(importance[None], BLOCK), mean[:, None])


def _round_away(x: torch.Tensor) -> torch.Tensor:
    """To the nearest integer, halves away from zero."""
    whole = x.trunc()
    return whole + x.sign() * ((x - whole).abs() >= 0.5)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Zero for what is no number: the inverse of the smallest scales is infinite."""
    return x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
