"""K-quants, llama.cpp's types of 2 to 6 bits, byte for byte as ggml writes them.

Each 256 consecutive weights make a super-block of 8 or 16 groups. Every group has a scale, and for
some types a minimum; these are integers of 4 to 8 bits times one fp16 number per super-block. So a
group is searched in full precision, its scale and minimum are rounded, and its weights are rounded
once more for what will be stored. Where the stored scale is zero, the levels of the search remain.

Without importance the search favours large weights; with importance (one number per column,
llama.cpp's imatrix) it weights by importance * sqrt(mean square of the super-block + x^2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import search

Numbers = tuple[torch.Tensor, torch.Tensor]
"""One fp16 number per super-block and one uint8 integer per group, to be multiplied."""


def q2_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """2 bits; groups of 16, each with a scale and a minimum of 4 bits."""
    groups = search.groups(x, 16)
    if importance is None:
        factors = search.candidates(range(16), 0.1, -0.5, 3)
        fitted = _fit(groups, groups.abs(), 3, 15, factors, absolute=True)
    else:
        fitted = _fit_important(groups, _weights(groups, importance, 1), 3, 15)
    levels, (d, scales), (dmin, minima) = fitted
    packed = scales | minima << 4
    levels = _round_affine(groups, (d, packed & 15), (dmin, packed >> 4), levels, 3)
    return search.join(packed, *_two_bits(levels), search.half_bytes(d), search.half_bytes(dmin))


def q3_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """3 bits; groups of 16, each with a signed scale of 6 bits."""
    groups = search.groups(x, 16)
    if importance is None:
        scale, levels = search.fit_by_descent(groups, 4)
        d, scales = _by_extreme(scale, 32)
        # A super-block of zeros is stored as zero bytes, not as the level that stands for zero.
        scales = (scales + 32).masked_fill_((scale == 0).all(0), 0)
    else:
        weights = _weights(groups, importance, 2)
        scale, levels = search.fit_symmetric(groups, weights, 4)
        d, scales = search.fit_symmetric(scale, search.ordered_sum(weights), 32)
        d = d.half()
    scales = scales.to(torch.uint8)
    levels = _round_symmetric(groups, d, scales.int() - 32, levels, 4)
    halves, quarters = search.pack(scales & 15, 4), search.pack(scales >> 4, 2)
    return search.join(*_three_bits(levels), halves, quarters, search.half_bytes(d))


def q4_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """4 bits; groups of 32, each with a scale and a minimum of 6 bits."""
    factors = search.candidates(range(21), 0.1, -1.0, 15)
    fields, levels = _four_or_five(x, importance, 15, factors)
    return search.join(*fields, *_four_bits(levels))


def q5_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """5 bits; groups of 32, each with a scale and a minimum of 6 bits."""
    factors = search.candidates(range(16), 0.1, -0.5, 31)
    fields, levels = _four_or_five(x, importance, 31, factors)
    return search.join(*fields, *_five_bits(levels))


def q6_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """6 bits; groups of 16, each with a signed scale of 8 bits. Errors are weighted by importance
    alone.
    """
    groups = search.groups(x, 16)
    weights = groups * groups if importance is None else search.groups(importance.expand_as(x), 16)
    scale, levels = search.fit_symmetric(groups, weights, 32)
    d, scales = _by_extreme(scale, 128)
    levels = _round_symmetric(groups, d, scales, levels, 32)
    fields = (
        *_six_bits(levels),
        scales.to(torch.int8).view(torch.uint8),
        search.half_bytes(d),
    )
    empty = scale.abs().amax(0) < search.EMPTY
    return search.join(*(field.masked_fill(empty, 0) for field in fields))


KINDS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    GGMLQuantizationType.Q2_K: q2_k,
    GGMLQuantizationType.Q3_K: q3_k,
    GGMLQuantizationType.Q4_K: q4_k,
    GGMLQuantizationType.Q5_K: q5_k,
    GGMLQuantizationType.Q6_K: q6_k,
}
"""x float32 [rows, columns], importance float32 [columns] or None; out uint8 [rows, bytes]."""


def _two_bits(levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (search.pack(levels, 2, 2),)


def _three_bits(levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return search.pack(levels >> 2, 1), search.pack(levels & 3, 2, 2)


def _four_bits(levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (search.pack(levels, 4, 4),)


def _five_bits(levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return search.pack(levels >> 4, 1), search.pack(levels & 15, 4, 4)


def _six_bits(levels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return search.pack(levels & 15, 4, 2), search.pack(levels >> 4, 2, 2)


@dataclass(frozen=True)
class Levels:
    """Where a super-block keeps the levels of its weights."""

    first: int
    """The byte they begin at ..."""
    last: int
    """... and the byte after them."""
    zero: int
    """The level that stands for a multiple of zero, of types without a minimum."""
    top: int
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


LEVELS = {
    GGMLQuantizationType.Q2_K: Levels(16, 80, 0, 3, _two_bits),
    GGMLQuantizationType.Q3_K: Levels(0, 96, 4, 7, _three_bits),
    GGMLQuantizationType.Q4_K: Levels(16, 144, 0, 15, _four_bits),
    GGMLQuantizationType.Q5_K: Levels(16, 176, 0, 31, _five_bits),
    GGMLQuantizationType.Q6_K: Levels(0, 192, 32, 63, _six_bits),
}


def with_levels(
    data: torch.Tensor, kind: GGMLQuantizationType, levels: torch.Tensor
) -> torch.Tensor:
    """The same blocks, bytes [rows, bytes of a row], with other levels uint8 [rows, columns]."""
    rows, columns = levels.shape
    place = LEVELS[kind]
    planes = levels.view(-1, search.SUPER).t().contiguous().view(search.SUPER, rows, -1)
    found = data.view(rows, columns // search.SUPER, -1).clone()
    found[:, :, place.first : place.last] = torch.cat(place.pack(planes)).permute(1, 2, 0)
    return found.view(rows, -1)


def _four_or_five(
    x: torch.Tensor, importance: torch.Tensor | None, top: int, factors: Sequence[float]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Bytes of d, of dmin, and of the scales and minima; then the levels, uint8 [256, ...]."""
    groups = search.groups(x, 32)
    if importance is None:
        mean = search.divide(search.ordered_sum(groups * groups), 32)
        weights = search.root(mean) + groups.abs()
        fitted = _fit(groups, weights, top, 63, factors)
    else:
        fitted = _fit_important(groups, _weights(groups, importance, 2), top, 63)
    levels, (d, scales), (dmin, minima) = fitted
    if importance is None or top == 31:
        # Negative values have wrapped; ggml leaves them so only for Q4_K with importance.
        scales = scales.clamp(max=63)
    head, tail = scales.chunk(2)
    low, high = minima.chunk(2)
    first, second = head | tail >> 4 << 6, low | high >> 4 << 6
    third = tail & 15 | (high & 15) << 4
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4])
    levels = _round_affine(groups, (d, scales), (dmin, minima), levels, top)
    return (search.half_bytes(d), search.half_bytes(dmin), first, second, third), levels


def _weights(groups: torch.Tensor, importance: torch.Tensor, factor: int) -> torch.Tensor:
    """Error weights of groups; `factor` multiplies the mean square."""
    mean = search.ordered_sum(search.ungroup(groups * groups)) * (factor / search.SUPER)
    return search.search_weights(groups, search.groups(importance[None], len(groups)), mean)


def _fit(
    groups: torch.Tensor,
    weights: torch.Tensor,
    top: int,
    limit: int,
    factors: Sequence[float],
    absolute: bool = False,
) -> tuple[torch.Tensor, Numbers, Numbers]:
    """Levels of groups, with scales and minima rounded so that the largest becomes `limit`."""
    scale, low, levels = search.fit_affine(groups, weights, top, factors, absolute)
    return levels, _by_largest(scale, limit), _by_largest(-low, limit)


def _fit_important(
    groups: torch.Tensor, weights: torch.Tensor, top: int, limit: int
) -> tuple[torch.Tensor, Numbers, Numbers]:
    """As `_fit`, with scales and minima rounded by weighted least squares."""
    factors = search.candidates(range(37), 0.05, -0.9, top)
    scale, low, levels = search.fit_affine(groups, weights, top, factors)
    # Both in one search: it takes many steps over few numbers.
    both, sums = torch.stack([scale, -low], 1), search.ordered_sum(weights).unsqueeze(1)
    d, integers = search.fit_positive(both, sums, limit)
    scales, minima = zip(d.half(), integers.to(torch.uint8).unbind(1), strict=True)
    return levels, scales, minima


def _by_largest(numbers: torch.Tensor, limit: int) -> Numbers:
    """Group values rounded so that the largest of a super-block becomes `limit`."""
    largest = numbers.amax(0)
    largest = torch.where(largest > 0, largest, 0.0)  # never -0, whose bytes differ
    inverse = search.divide_or_zero(limit, largest)
    integers = search.nearest(inverse * numbers) & 255
    return search.divide(largest, limit).half(), integers.to(torch.uint8)


def _by_extreme(numbers: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed group values rounded so that the one farthest from zero becomes -limit."""
    peak = search.extreme(numbers)
    inverse = search.divide(-limit, peak)
    integers = search.nearest(inverse * numbers).clamp_(-limit, limit - 1)
    return search.divide(1, inverse).masked_fill_(peak == 0, 0).half(), integers


def _round_affine(
    groups: torch.Tensor, scales: Numbers, minima: Numbers, searched: torch.Tensor, top: int
) -> torch.Tensor:
    """Levels uint8 [256, ...] for the stored scales and minima."""
    scale, minimum = (d.float() * integers for d, integers in (scales, minima))
    levels = search.nearest((groups + minimum).div_(scale)).clamp_(0, top)
    return _levels(levels, searched, scale)


def _round_symmetric(
    groups: torch.Tensor, d: torch.Tensor, scales: torch.Tensor, searched: torch.Tensor, top: int
) -> torch.Tensor:
    """Levels uint8 [256, ...] for the stored scales, shifted by `top` so that none is negative."""
    scale = d.float() * scales
    levels = search.nearest(groups / scale).clamp_(-top, top - 1).add_(top)
    return _levels(levels, searched, scale)


def _levels(levels: torch.Tensor, searched: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    kept = torch.where(scale == 0, searched.to(torch.uint8), levels.to(torch.uint8))
    return search.ungroup(kept)
