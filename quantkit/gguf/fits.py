"""ggml's searches for scales: blocks of weights in, for each the scale and levels that fit best.

All blocks [n, size] are searched at once, one candidate after the other. Candidates tie or nearly
tie often, so every float32 operation happens in ggml's order, sums from left to right, one rounding
an operation: then CPU and GPU choose what ggml chooses. Three habits follow, here and in the types:
no fused multiply-add, no `number / tensor` and no `tensor / number`, which torch may compute as a
product with the rounded reciprocal. Sums read column after column; see `column_major`.
"""

from collections.abc import Sequence

import torch

NOTHING = 1e-15
"""ggml takes a block for zeros when its largest weight is smaller."""


def column_major(blocks: torch.Tensor) -> torch.Tensor:
    """The same [n, size], stored so that each column is contiguous: sums in order become fast."""
    return blocks.t().contiguous().t()


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum of every row [n, 1], added from left to right."""
    first, *others = _columns(values)
    result = first + 0.0  # a sum that starts at zero is never -0
    for column in others:
        result += column
    return result


def quotient(number: float, values: torch.Tensor) -> torch.Tensor:
    """number / values, rounded once."""
    return torch.div(values.new_full((), number), values)


def root(values: torch.Tensor) -> torch.Tensor:
    """Square roots, rounded once: torch's own in float32 is off by a bit in one of 140."""
    return values.double().sqrt_().float()


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The nearest integers as ggml finds them, int32: ties to even, wrapped beyond 22 bits."""
    return ((values + 12582912.0).view(torch.int32) & 0x7FFFFF) - 0x400000


def candidates(start: float, step: float, steps: Sequence[int], top: int) -> list[float]:
    """step * i + start + top for every i, each operation rounded to float32."""
    return (torch.tensor(steps, dtype=torch.float32) * step + start + top).tolist()


def symmetric(
    x: torch.Tensor, weights: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [n, 1] and levels 0..2 top - 1 with x close to (level - top) * scale.

    Tries 19 scales around the one that puts the largest weight on the grid's larger end; each is
    then replaced by the least squares fit to its levels. (ggml's make_qx_quants)
    """
    furthest = peak(x)
    empty = furthest.abs() < NOTHING
    weighted = weights * x

    def snap(inverse: torch.Tensor) -> torch.Tensor:
        return (x * inverse).round_().clamp_(-top, top - 1)

    def sums(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return total(weighted * levels), total((weights * levels).mul_(levels))

    chosen = quotient(-top, furthest)
    cross, square = sums(snap(chosen))
    scale = torch.where(square != 0, cross / square, 0.0)
    best = scale * cross
    for factor in candidates(0.0, 0.1, [*range(-9, 0), *range(1, 10)], top):
        inverse = quotient(-factor, furthest)
        cross, square = sums(snap(inverse))
        better = (square > 0) & (cross * cross > best * square)
        chosen = torch.where(better, inverse, chosen)
        scale = torch.where(better, cross / square, scale)
        best = torch.where(better, scale * cross, best)
    return scale.masked_fill_(empty, 0), snap(chosen).add_(top).masked_fill_(empty, 0)


def symmetric_by_descent(x: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `symmetric`, weighted by x squared, but from one start by moving single levels.

    (ggml's make_q3_quants)
    """
    furthest = peak(x)
    empty = furthest.abs() < NOTHING
    levels = nearest(x * quotient(-top, furthest)).clamp_(-top, top - 1)
    scale, levels = _descend(x, x * x, levels, top, signed=True)
    return scale.masked_fill_(empty, 0), (levels + top).masked_fill_(empty, 0)


def positive(x: torch.Tensor, weights: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [n, 1] and levels 0..top with x >= 0 close to level * scale.

    The best of nine scales is the start, then single levels move. A negative x, which `affine`
    makes when hardly a weight of a block counts, may get a negative level; ggml keeps levels in
    bytes, so 256 is added, and so it is here. (ggml's make_qp_quants)
    """
    largest = x.amax(-1, keepdim=True)
    empty = largest < NOTHING

    def error(levels: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        change = x - quotient(1, inverse) * levels
        return total(weights * change * change)

    chosen = quotient(top, largest)
    least = error(nearest(chosen * x) & 255, chosen)
    for factor in candidates(0.0, 0.1, [*range(-4, 0), *range(1, 5)], top):
        inverse = quotient(factor, largest)
        new_error = error(nearest(inverse * x).clamp_(max=top), inverse)
        better = new_error < least
        chosen = torch.where(better, inverse, chosen)
        least = torch.where(better, new_error, least)
    levels = nearest(chosen * x).clamp_(max=top)
    scale, levels = _descend(x, weights, levels, top, signed=False)
    return scale.masked_fill_(empty, 0), levels.masked_fill_(empty, 0)


def affine(
    x: torch.Tensor,
    weights: torch.Tensor,
    top: int,
    factors: Sequence[float],
    absolute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and minima [n, 1] and levels 0..top with x close to level * scale - minimum.

    The error is squared or `absolute`. Each factor divided by the range of x, which begins at the
    best minimum so far, gives levels, and these by least squares a scale and a minimum, never
    negative. (ggml's make_qkx2_quants and make_qkx3_quants)
    """
    low = x.amin(-1, keepdim=True).clamp_(max=0)
    high = x.amax(-1, keepdim=True)
    sum_w, sum_x = total(weights), total(weights * x)

    def snap(low: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return (x - low).mul_(inverse).round_().clamp_(0, top)

    def error(levels: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        change = (scale * levels).add_(low).sub_(x)
        return total((change.abs_() if absolute else change.square_()).mul_(weights))

    inverse = quotient(top, high - low)
    scale = quotient(1, inverse)
    least = error(snap(low, inverse), scale, low)
    chosen = low, inverse
    for factor in factors:
        inverse = quotient(factor, high - low)
        levels = snap(low, inverse)
        weighted = weights * levels
        sum_l, sum_l2, sum_xl = total(weighted), total(weighted * levels), total(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        new_low = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = new_low > 0
        new_scale = torch.where(above, sum_xl / sum_l2, new_scale)
        new_low = torch.where(above, 0.0, new_low)
        new_error = error(levels, new_scale, new_low)
        better = (determinant > 0) & (new_error < least)
        chosen = torch.where(better, low, chosen[0]), torch.where(better, inverse, chosen[1])
        scale = torch.where(better, new_scale, scale)
        low = torch.where(better, new_low, low)
        least = torch.where(better, new_error, least)
    # Equal weights have no range: the scale became 1 / infinity, the levels are not numbers.
    return scale, -low, snap(*chosen).nan_to_num_(0.0)


def peak(x: torch.Tensor) -> torch.Tensor:
    """The number of every row that is furthest from zero [n, 1], of equals the first."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def _columns(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values.chunk(values.shape[-1], -1)


def _descend(
    x: torch.Tensor, weights: torch.Tensor, levels: torch.Tensor, top: int, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Five passes over the columns, each moving a level where that fits all the block better."""
    weighted = weights * x
    cross, square = total(weighted * levels), total(weights * levels * levels)
    chosen = list(_columns(levels if signed else levels & 255))
    columns = list(zip(_columns(x), _columns(weights), _columns(weighted), strict=True))
    for _ in range(5):
        for i, (value, weight, product) in enumerate(columns):
            level = chosen[i]
            rest = cross - product * level
            rest_square = square - weight * level * level
            moved = nearest(value * rest_square / rest)
            moved = moved.clamp_(-top, top - 1) if signed else moved.clamp_(max=top)
            new_cross = rest + product * moved
            new_square = rest_square + weight * moved * moved
            better = (rest > 0) & (moved != level) & (new_square > 0)
            if not signed:
                better &= rest_square > 0
            better &= new_cross * new_cross * square > cross * cross * new_square
            chosen[i] = torch.where(better, moved if signed else moved & 255, level)
            cross = torch.where(better, new_cross, cross)
            square = torch.where(better, new_square, square)
    return torch.where(square > 0, cross / square, 0.0), torch.cat(chosen, -1)
