"""The nonlinear GGUF types, equal to ggml's: four bits that stand for sixteen uneven values.

The values are denser around zero, where most weights are. IQ4_NL has one scale per 32 numbers;
IQ4_XS has a scale of six bits per 32 and one per 256. Scales are searched with and without
importance; without it an error is weighted by the square of its number.
"""

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import search
from quantkit.gguf.values import NONLINEAR

BLOCK = 32


def iq4_nl(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Sixteen values and a scale."""
    blocks = search.planes(x, BLOCK)
    weights = blocks * blocks
    if importance is not None:
        mean = search.ordered_sum(weights) * (2 / BLOCK)
        weights = search.search_weights(blocks, search.planes(importance[None], BLOCK), mean)
    scale = _fit(blocks, weights)
    levels = _look_up(_levels(x.device), blocks, search.divide_or_zero(1, scale))
    return search.join(search.half_bytes(scale), search.pack(levels, 4))


def iq4_xs(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Sixteen values, a scale of six bits per 32 numbers, and one scale per eight of those."""
    groups = search.groups(x, BLOCK)
    weights = groups * groups
    if importance is not None:
        mean = search.ordered_sum(search.ungroup(weights)) * (2 / search.SUPER)
        weights = search.search_weights(groups, search.groups(importance[None], BLOCK), mean)
    scales = _fit(groups, weights)
    scale = search.divide(search.extreme(scales), -32)
    steps = (search.divide_or_zero(1, scale) * scales).round_().clamp_(-32, 31)
    levels = _look_up(_levels(x.device), groups, search.divide_or_zero(1, scale * steps))
    stored = (steps + 32).to(torch.uint8)
    return search.join(
        search.half_bytes(scale),
        search.pack(stored >> 4, 2, 2),
        search.pack(stored & 15, 4, 4),
        search.pack(search.ungroup(levels), 4, 8),
    )


KINDS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    GGMLQuantizationType.IQ4_NL: iq4_nl,
    GGMLQuantizationType.IQ4_XS: iq4_xs,
}


def _fit(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The scale of every block, of either sign.

    The extreme number is tried at 127 first, then near -127. Each candidate picks values for x, for
    which the best scale is known; the candidate with the least weighted error wins.
    """
    peak = search.extreme(x)
    empty = peak.abs() < search.EMPTY
    peak.masked_fill_(empty, 1)
    values = torch.tensor(NONLINEAR, dtype=x.dtype, device=x.device)[_levels(x.device).int()]

    def sums(inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked = _look_up(values, x, inverse)
        weighted = weights * picked
        return search.ordered_sum(weighted * x), search.ordered_sum(weighted * picked)

    product, square = sums(search.divide(1, search.divide(peak, 127)))
    scale = search.divide_or_zero(product, square)
    best = scale * product
    for offset in range(-7, 8):
        product, square = sums(search.divide(offset - 127, peak))
        better = (square > 0) & (product * product > best * square)
        scale = torch.where(better, search.divide(product, square), scale)
        best = torch.where(better, scale * product, best)
    return scale.masked_fill_(empty, 0)


def _levels(device: torch.device) -> torch.Tensor:
    """The level of the nearest value, the upper one on ties, for -128, -127.5 ... 127.5.

    The nearest value changes halfway between integers, so a number rounded down to a half has the
    same level as the number itself. A search among sixteen values takes torch six times as long.
    """
    values = torch.tensor(NONLINEAR, device=device)
    twice = torch.arange(-256, 256, device=device)
    return (twice[:, None] >= values[1:] + values[:-1]).sum(-1, dtype=torch.uint8)


def _look_up(table: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Look up x * inverse in a table that is in the order of `_levels`."""
    at = (x * (2 * inverse)).floor_().clamp_(-256, 255).add_(256).int()
    return table.index_select(0, at.flatten()).view(at.shape)
