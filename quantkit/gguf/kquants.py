"""K-quants, llama.cpp's types of 2 to 6 bits: weights in, the bytes that ggml would write out.

256 weights in a row make a super-block of 8 or 16 groups. Every group has a scale, and for some
types a minimum; these are integers of 4 to 8 bits times one fp16 number of the super-block. So a
group is searched in full precision, its scale and minimum are rounded, and its weights are rounded
once more for what will be stored. Where the stored scale is zero, the levels of the search remain.

Without importance the search weighs large weights more; with importance (one number a column,
llama.cpp's imatrix) it weighs by importance * sqrt(mean square of the super-block + x^2).
"""

from collections.abc import Callable, Sequence

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import fits

SUPER = 256

Numbers = tuple[torch.Tensor, torch.Tensor]
"""One fp16 number a super-block [n, 1] and integers uint8 [n, groups]: their products count."""


def q2_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """2 bits; groups of 16 with a scale and a minimum of 4 bits each."""
    groups = _groups(x, 16)
    if importance is None:
        search = (-0.5, 0.1, range(16))
        fitted = _fit(groups, groups.abs(), 3, 15, search, absolute=True)
    else:
        fitted = _fit_important(groups, _weights(x, importance, 16, 1), 3, 15)
    levels, (d, scales), (dmin, minima) = fitted
    packed = scales | minima << 4
    levels = _round_affine(groups, (d, packed & 15), (dmin, packed >> 4), levels, 3)
    low = _interleave(levels.view(-1, 2, 4, 32), 2)
    return _rows(x, packed, low, _bytes(d), _bytes(dmin))


def q3_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """3 bits; groups of 16 with a signed scale of 6 bits."""
    groups = _groups(x, 16)
    if importance is None:
        scale, levels = fits.symmetric_by_descent(groups, 4)
        d, scales = _by_furthest(scale.view(-1, 16), 32)
        # A super-block of zeros has zeros for bytes, not the level that stands for zero.
        empty = (scale == 0).view(-1, 16).all(-1, keepdim=True)
        scales = (scales + 32).masked_fill_(empty, 0)
    else:
        weights = _weights(x, importance, 16, 2)
        scale, levels = fits.symmetric(groups, weights, 4)
        d, scales = fits.symmetric(_by_super(scale, 16), _by_super(fits.total(weights), 16), 32)
        d = d.half()
    scales = scales.to(torch.uint8).contiguous()
    levels = _round_symmetric(groups, d, scales.int() - 32, levels, 4)
    high = _interleave((levels >> 2).view(-1, 1, 8, 32), 1)
    low = _interleave((levels & 3).view(-1, 2, 4, 32), 2)
    halves = _interleave((scales & 15).view(-1, 1, 2, 8), 4)
    quarters = _interleave((scales >> 4).view(-1, 1, 4, 4), 2)
    return _rows(x, high, low, halves, quarters, _bytes(d))


def q4_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """4 bits; groups of 32 with a scale and a minimum of 6 bits each."""
    d, dmin, packed, levels = _four_or_five(x, importance, 15, (-1.0, 0.1, range(21)))
    low = _interleave(levels.view(-1, 4, 2, 32), 4)
    return _rows(x, d, dmin, packed, low)


def q5_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """5 bits; groups of 32 with a scale and a minimum of 6 bits each."""
    d, dmin, packed, levels = _four_or_five(x, importance, 31, (-0.5, 0.1, range(16)))
    high = _interleave((levels >> 4).view(-1, 1, 8, 32), 1)
    low = _interleave((levels & 15).view(-1, 4, 2, 32), 4)
    return _rows(x, d, dmin, packed, high, low)


def q6_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """6 bits; groups of 16 with a signed scale of 8 bits. Importance alone is the weight."""
    groups = _groups(x, 16)
    weights = groups * groups if importance is None else _groups(importance.expand_as(x), 16)
    scale, levels = fits.symmetric(groups, weights, 32)
    scale = scale.view(-1, 16)
    d, scales = _by_furthest(scale, 128)
    levels = _round_symmetric(groups, d, scales, levels, 32)
    low = _interleave((levels & 15).view(-1, 2, 2, 64), 4)
    high = _interleave((levels >> 4).view(-1, 2, 4, 32), 2)
    row = _rows(x, low, high, scales.to(torch.int8).view(torch.uint8), _bytes(d))
    empty = scale.abs().amax(-1, keepdim=True) < fits.NOTHING
    return row.view(len(empty), -1).masked_fill_(empty, 0).view_as(row)


KINDS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    GGMLQuantizationType.Q2_K: q2_k,
    GGMLQuantizationType.Q3_K: q3_k,
    GGMLQuantizationType.Q4_K: q4_k,
    GGMLQuantizationType.Q5_K: q5_k,
    GGMLQuantizationType.Q6_K: q6_k,
}
"""x float32 [rows, columns], importance float32 [columns] or None; out uint8 [rows, bytes]."""


def _four_or_five(
    x: torch.Tensor,
    importance: torch.Tensor | None,
    top: int,
    search: tuple[float, float, Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes of d, of dmin, of the scales and minima; levels uint8 [n, 256]."""
    groups = _groups(x, 32)
    if importance is None:
        weights = fits.root(fits.total(groups * groups) / 32) + groups.abs()
        fitted = _fit(groups, weights, top, 63, search)
    else:
        fitted = _fit_important(groups, _weights(x, importance, 32, 2), top, 63)
    levels, (d, scales), (dmin, minima) = fitted
    if importance is None or top == 31:
        # What was negative has wrapped; ggml leaves it so for Q4_K with importance only.
        scales = scales.clamp(max=63)
    head, tail = scales.chunk(2, -1)
    low, high = minima.chunk(2, -1)
    first, second = head | tail >> 4 << 6, low | high >> 4 << 6
    third = tail & 15 | (high & 15) << 4
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    levels = _round_affine(groups, (d, scales), (dmin, minima), levels, top)
    return _bytes(d), _bytes(dmin), torch.cat([first, second, third], -1), levels


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    assert x.dtype == torch.float32
    assert x.shape[1] % SUPER == 0
    return fits.column_major(x.reshape(-1, size))


def _by_super(values: torch.Tensor, groups: int) -> torch.Tensor:
    """Numbers of groups [n, 1] in rows, one a super-block, for a search among them."""
    return fits.column_major(values.view(-1, groups))


def _weights(x: torch.Tensor, importance: torch.Tensor, size: int, factor: int) -> torch.Tensor:
    """What weighs the errors of groups; `factor` multiplies the mean square."""
    squares = x * x
    mean = factor * fits.total(_groups(squares, SUPER)) / SUPER
    spread = fits.root(squares.reshape(len(x), -1, SUPER) + mean.view(len(x), -1, 1))
    return _groups(importance * spread.flatten(1), size)


def _fit(
    groups: torch.Tensor,
    weights: torch.Tensor,
    top: int,
    limit: int,
    search: tuple[float, float, Sequence[int]],
    absolute: bool = False,
) -> tuple[torch.Tensor, Numbers, Numbers]:
    """Levels of groups, scales and minima, of which the largest becomes `limit`."""
    factors = fits.candidates(*search, top)
    scale, minimum, levels = fits.affine(groups, weights, top, factors, absolute)
    of_super = SUPER // groups.shape[1]
    scales, minima = (_by_largest(v.view(-1, of_super), limit) for v in (scale, minimum))
    return levels, scales, minima


def _fit_important(
    groups: torch.Tensor, weights: torch.Tensor, top: int, limit: int
) -> tuple[torch.Tensor, Numbers, Numbers]:
    """As `_fit`, with scales and minima rounded by weighted least squares."""
    factors = fits.candidates(-0.9, 0.05, range(37), top)
    scale, minimum, levels = fits.affine(groups, weights, top, factors)
    values = (_by_super(v, SUPER // groups.shape[1]) for v in (scale, minimum, fits.total(weights)))
    scale, minimum, sums = values
    d, scales = fits.positive(scale, sums, limit)
    dmin, minima = fits.positive(minimum, sums, limit)
    return levels, (d.half(), scales.to(torch.uint8)), (dmin.half(), minima.to(torch.uint8))


def _by_largest(values: torch.Tensor, limit: int) -> Numbers:
    """Numbers of groups [n, groups] rounded so that the largest becomes `limit`."""
    largest = values.amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 0.0)  # never -0, whose bytes differ
    inverse = torch.where(largest > 0, fits.quotient(limit, largest), 0.0)
    integers = fits.nearest(inverse * values) & 255
    return (largest / largest.new_full((), limit)).half(), integers.to(torch.uint8)


def _by_furthest(values: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed numbers of groups, rounded so that the furthest from zero becomes -limit."""
    furthest = fits.peak(values)
    inverse = fits.quotient(-limit, furthest)
    integers = fits.nearest(inverse * values).clamp_(-limit, limit - 1)
    return fits.quotient(1, inverse).masked_fill_(furthest == 0, 0).half(), integers


def _round_affine(
    groups: torch.Tensor, scales: Numbers, minima: Numbers, searched: torch.Tensor, top: int
) -> torch.Tensor:
    """Levels uint8 [n, 256] for the scales and minima as stored."""
    scale, minimum = ((d.float() * integers).reshape(-1, 1) for d, integers in (scales, minima))
    levels = fits.nearest((groups + minimum) / scale).clamp_(0, top)
    return _levels(levels, searched, scale)


def _round_symmetric(
    groups: torch.Tensor, d: torch.Tensor, scales: torch.Tensor, searched: torch.Tensor, top: int
) -> torch.Tensor:
    """Levels uint8 [n, 256], shifted by `top` so that none is negative, for scales as stored."""
    scale = (d.float() * scales).reshape(-1, 1)
    levels = fits.nearest(groups / scale).clamp_(-top, top - 1).add_(top)
    return _levels(levels, searched, scale)


def _levels(levels: torch.Tensor, searched: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    kept = torch.where(scale == 0, searched.to(torch.uint8), levels.to(torch.uint8))
    return kept.reshape(-1, SUPER)


def _interleave(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, sets, parts, bytes] to [n, sets * bytes]: a byte holds one level of each part.

    The first part has the lowest bits.
    """
    first, *others = parts.unbind(2)
    result = first.clone()
    for i, part in enumerate(others, 1):
        result |= part << bits * i
    return result.flatten(1)


def _bytes(d: torch.Tensor) -> torch.Tensor:
    return d.contiguous().view(torch.uint8)


def _rows(x: torch.Tensor, *fields: torch.Tensor) -> torch.Tensor:
    """The fields of every super-block one after the other, in the rows of x."""
    return torch.cat(fields, -1).view(len(x), -1)
