"""K-quants, llama.cpp's types of 2 to 6 bits: weights in, the bytes that ggml itself would write out.

256 weights in a row make a super-block of 8 or 16 groups. Every group has a scale, and for some
types a minimum, which are themselves integers of 4 to 8 bits times one fp16 number of the
super-block. So a group is searched first in full precision, then its scale is rounded, then its
weights are rounded once more with what became of the scale. Where that is nothing, the levels of
the search remain.

Without importance the weights of the search grow with |x|; with importance (one number a column,
llama.cpp's imatrix) they are importance * sqrt(mean square of the super-block + x^2).
"""

from collections.abc import Callable, Sequence

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import fits

SUPER = 256
WITH_IMPORTANCE = (-0.9, 0.05, range(37))


def q2_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """2 bits; groups of 16 with a scale and a minimum of 4 bits each."""
    groups = _groups(x, 16)
    if importance is None:
        factors = fits.candidates(-0.5, 0.1, range(16), 3)
        fit = fits.affine(groups, groups.abs(), 3, factors, absolute=True)
        scale, minimum, levels = fit
        d, scales = _by_largest(scale.view(-1, 16), 15)
        dmin, minima = _by_largest(minimum.view(-1, 16), 15)
    else:
        weights = _importance_weights(x, importance, 16, 1)
        scale, minimum, levels = fits.affine(
            groups, weights, 3, fits.candidates(*WITH_IMPORTANCE, 3)
        )
        sums = fits.total(weights).view(-1, 16)
        d, scales = _by_fit(scale.view(-1, 16), sums, 15)
        dmin, minima = _by_fit(minimum.view(-1, 16), sums, 15)
    levels = _round_affine(groups, d, scales, dmin, minima, levels, 3)
    packed = scales | minima << 4
    low = _interleave(levels.view(-1, 2, 4, 32), 2).flatten(1)
    return _rows(x, packed, low, _bytes(d), _bytes(dmin))


def q3_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """3 bits; groups of 16 with a signed scale of 6 bits."""
    groups = _groups(x, 16)
    if importance is None:
        scale, levels = fits.symmetric_by_descent(groups, 4)
        scale = scale.view(-1, 16)
        d, scales = _by_furthest(scale, 32)
        # A super-block of zeros has zeros for bytes, not the level that stands for zero.
        scales = (scales + 32).masked_fill_((scale == 0).all(-1, keepdim=True), 0)
    else:
        weights = _importance_weights(x, importance, 16, 2)
        scale, levels = fits.symmetric(groups, weights, 4)
        sums = fits.total(weights).view(-1, 16)
        d, scales = fits.symmetric(
            fits.column_major(scale.view(-1, 16)), fits.column_major(sums), 32
        )
        d = d.half()
    scales = scales.to(torch.uint8).contiguous()
    levels = _round_symmetric(groups, d, scales.to(torch.int32) - 32, levels, 4)
    high = _interleave((levels >> 2).view(-1, 1, 8, 32), 1).flatten(1)
    low = _interleave((levels & 3).view(-1, 2, 4, 32), 2).flatten(1)
    halves = _interleave((scales & 15).view(-1, 1, 2, 8), 4).flatten(1)
    quarters = _interleave((scales >> 4).view(-1, 1, 4, 4), 2).flatten(1)
    return _rows(x, high, low, halves, quarters, _bytes(d))


def q4_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """4 bits; groups of 32 with a scale and a minimum of 6 bits each."""
    d, dmin, packed, levels = _four_or_five(x, importance, 15, (-1.0, 0.1, range(21)))
    low = _interleave(levels.view(-1, 4, 2, 32), 4).flatten(1)
    return _rows(x, d, dmin, packed, low)


def q5_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """5 bits; groups of 32 with a scale and a minimum of 6 bits each."""
    d, dmin, packed, levels = _four_or_five(x, importance, 31, (-0.5, 0.1, range(16)))
    high = _interleave((levels >> 4).view(-1, 1, 8, 32), 1).flatten(1)
    low = _interleave((levels & 15).view(-1, 4, 2, 32), 4).flatten(1)
    return _rows(x, d, dmin, packed, high, low)


def q6_k(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """6 bits; groups of 16 with a signed scale of 8 bits. Importance weighs as it is."""
    groups = _groups(x, 16)
    if importance is None:
        weights = groups * groups
    else:
        weights = _groups(importance.expand_as(x), 16)
    scale, levels = fits.symmetric(groups, weights, 32)
    scale = scale.view(-1, 16)
    empty = scale.abs().amax(-1, keepdim=True) < fits.NOTHING
    d, scales = _by_furthest(scale, 128)
    levels = _round_symmetric(groups, d, scales, levels, 32)
    parts = levels.view(-1, 2, 4, 32)
    low = _interleave((parts & 15).view(-1, 2, 2, 64), 4).flatten(1)
    high = _interleave(parts >> 4, 2).flatten(1)
    blocks = torch.cat([low, high, scales.to(torch.int8).view(torch.uint8), _bytes(d)], -1)
    return blocks.masked_fill_(empty, 0).view(len(x), -1)


KINDS: dict[
    GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
] = {
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
    groups = _groups(x, 32)
    if importance is None:
        size = fits.root(fits.total(groups * groups) / 32)
        fit = fits.affine(groups, size + groups.abs(), top, fits.candidates(*search, top))
        scale, minimum, levels = fit
        d, scales = _by_largest(scale.view(-1, 8), 63)
        dmin, minima = _by_largest(minimum.view(-1, 8), 63)
    else:
        weights = _importance_weights(x, importance, 32, 2)
        scale, minimum, levels = fits.affine(
            groups, weights, top, fits.candidates(*WITH_IMPORTANCE, top)
        )
        sums = fits.total(weights).view(-1, 8)
        d, scales = _by_fit(scale.view(-1, 8), sums, 63)
        dmin, minima = _by_fit(minimum.view(-1, 8), sums, 63)
    levels = _round_affine(groups, d, scales, dmin, minima, levels, top)
    packed = torch.cat(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
        ],
        -1,
    )
    return _bytes(d), _bytes(dmin), packed, levels


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    return fits.column_major(x.reshape(-1, size))


def _importance_weights(
    x: torch.Tensor, importance: torch.Tensor, size: int, factor: int
) -> torch.Tensor:
    squares = x * x
    mean = factor * fits.total(_groups(squares, SUPER)) / SUPER
    spread = fits.root(squares.view(len(x), -1, SUPER) + mean.view(len(x), -1, 1))
    return _groups(importance * spread.view_as(x), size)


def _by_largest(values: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 [n, 1] and integers [n, groups] for numbers of groups, the largest becoming `top`."""
    largest = values.amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 0.0)  # -0 too, whose bytes differ
    inverse = torch.where(largest > 0, fits.quotient(top, largest), 0.0)
    levels = (fits.nearest(inverse * values) & 255).clamp_(max=top)
    return (largest / values.new_tensor(top)).half(), levels.to(torch.uint8)


def _by_fit(
    values: torch.Tensor, weights: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 [n, 1] and integers [n, groups] for numbers of groups, by weighted least squares."""
    d, levels = fits.positive(fits.column_major(values), fits.column_major(weights), top)
    return d.half(), levels.to(torch.uint8).contiguous()


def _by_furthest(values: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 [n, 1] and integers [n, groups], the number furthest from zero becoming -top."""
    peak = fits.peak(values)
    inverse = fits.quotient(-top, peak)
    levels = fits.nearest(inverse * values).clamp_(-top, top - 1)
    return fits.quotient(1, inverse).masked_fill_(peak == 0, 0).half(), levels


def _round_affine(
    groups: torch.Tensor,
    d: torch.Tensor,
    scales: torch.Tensor,
    dmin: torch.Tensor,
    minima: torch.Tensor,
    levels: torch.Tensor,
    top: int,
) -> torch.Tensor:
    """Levels uint8 [n, 256] for the scales and minima that will be stored."""
    scale, minimum = (d.float() * scales).view(-1, 1), (dmin.float() * minima).view(-1, 1)
    rounded = fits.nearest((groups + minimum) / scale).clamp_(0, top)
    kept = torch.where(scale == 0, levels.to(torch.uint8), rounded.to(torch.uint8))
    return kept.reshape(-1, SUPER)


def _round_symmetric(
    groups: torch.Tensor, d: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, top: int
) -> torch.Tensor:
    """Levels uint8 [n, 256], shifted by `top`, for the scales that will be stored."""
    scale = (d.float() * scales).view(-1, 1)
    rounded = fits.nearest(groups / scale).clamp_(-top, top - 1) + top
    kept = torch.where(scale == 0, levels.to(torch.uint8), rounded.to(torch.uint8))
    return kept.reshape(-1, SUPER)


def _interleave(parts: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes that hold one level of each part [..., parts, bytes], the first in the lowest bits."""
    first, *others = parts.unbind(-2)
    result = first.clone()
    for i, part in enumerate(others, 1):
        result |= part << bits * i
    return result


def _bytes(d: torch.Tensor) -> torch.Tensor:
    return d.contiguous().view(torch.uint8)


def _rows(x: torch.Tensor, *fields: torch.Tensor) -> torch.Tensor:
    """The fields of every super-block one after the other, in the rows of x."""
    return torch.cat(fields, -1).view(len(x), -1)
