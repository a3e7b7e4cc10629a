"""Shared by the block types: planes of numbers, ggml's arithmetic, its scale searches, packing.

ggml processes one block after the other; here all blocks are processed together, as planes [numbers
per block, rows, blocks per row]: per-block values lack the first dimension. Candidates tie or
nearly tie often, so every operation in float32 rounds as ggml's does and sums keep its order; then
CPU and GPU choose what ggml chooses. Three rules follow, here and in the types: no product fused
with a sum, no torch reduction for a sum, and `divide` for plain numbers.
"""

from collections.abc import Iterable, Sequence

import torch

EMPTY = 1e-15
"""A block whose largest number is below this is stored as zeros."""
SUPER = 256
"""Numbers per super-block, whose groups share the precision of their scales."""


def planes(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, columns] as [numbers per block, rows, blocks per row]."""
    assert x.dtype == torch.float32
    # In two dimensions torch has a fast copy for this.
    return x.reshape(-1, size).t().contiguous().view(size, len(x), -1)


def groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, columns] as [numbers per group, groups per super-block, rows, super-blocks].

    Each group thus has its own planes, with super-blocks as blocks.
    """
    parts = planes(x, SUPER).view(SUPER // size, size, len(x), -1)
    return parts.transpose(0, 1).contiguous()


def ungroup(numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of `groups`: planes [numbers per super-block, rows, super-blocks]."""
    return numbers.transpose(0, 1).flatten(0, 1)


def join(*fields: torch.Tensor) -> torch.Tensor:
    """Fields of blocks, each uint8 [bytes, rows, blocks per row], as rows of bytes."""
    rows = fields[0].shape[1]
    return torch.cat(fields).flatten(1).t().contiguous().view(rows, -1)


def half_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The two bytes of each number as float16, low byte first, in a new first dimension."""
    return numbers.half().unsqueeze(-1).view(torch.uint8).movedim(-1, 0)


def pack(levels: torch.Tensor, bits: int, n_sets: int = 1) -> torch.Tensor:
    """Pack low-bit levels, uint8 [numbers, ...], several to a byte.

    The numbers form sets, a set is split into as many parts as a byte has room for levels, and a
    byte takes one level of each part, the first part's in its lowest bits.
    """
    first, *others = levels.reshape(n_sets, 8 // bits, -1, *levels.shape[1:]).unbind(1)
    packed = first.clone()
    for place, part in enumerate(others, 1):
        packed |= part << bits * place
    return packed.flatten(0, 1)


def ordered_sum(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum over the first dimension, in order as in a loop.

    A torch reduction has its own order, different on every device, and its last bit decides between
    two equally good scales, or where a scale rounds to float16.
    """
    first, *others = terms
    total = first + 0.0  # ggml starts from zero, which removes the sign of a negative zero
    for term in others:
        total += term
    return total


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b, correctly rounded: with a plain number torch may multiply by the inverse."""
    if not isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        a = b.new_full((), a)
    return torch.div(a, b if isinstance(b, torch.Tensor) else a.new_full((), b))


def divide_or_zero(a: torch.Tensor | float, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 0 where b is 0."""
    return divide(a, b).masked_fill(b == 0, 0)


def root(x: torch.Tensor) -> torch.Tensor:
    """Square roots, rounded once: torch's own in float32 is off by one bit in one case of 140."""
    return x.double().sqrt_().float()


def nearest(x: torch.Tensor) -> torch.Tensor:
    """The nearest integers as ggml finds them, int32: ties to even, wrapped beyond 22 bits."""
    return ((x + 12582912.0).view(torch.int32) & 0x7FFFFF) - 0x400000


def extreme(x: torch.Tensor) -> torch.Tensor:
    """Each block's number farthest from zero, with its sign; the first on ties."""
    found: torch.Tensor = x.gather(0, x.abs().max(0, keepdim=True).indices)[0]
    return found + 0.0  # the extreme of a block of negative zeros is zero


def limits(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest number of every block.

    The first on ties: zero has two signs, and a minimum is stored with its own.
    """
    low, high = x.amin(0), x.amax(0)
    if ((low == 0) | (high == 0)).any():  # rare, and finding the first takes 30 times as long
        return x.min(0).values, x.max(0).values
    return low, high


def candidates(steps: Sequence[int], width: float, *offsets: float) -> list[float]:
    """width * step + offset + offset ... for every step, each operation in float32."""
    factors = torch.tensor(steps, dtype=torch.float32) * width
    for offset in offsets:
        factors += offset
    return factors.tolist()


def search_weights(x: torch.Tensor, importance: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Error weights of the numbers: `mean` is the mean square that x is compared with."""
    return importance * root(mean + x * x)


def fit_symmetric(
    x: torch.Tensor, weights: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's scale and its levels of 0 ... 2 half - 1; x is (level - half) * scale.

    Candidates put the extreme number near -half. Each rounds x to integers, for which the best
    scale is known; the candidate with the least weighted error wins. (ggml's make_qx_quants)
    """
    wanted = candidates([*range(-9, 0), *range(1, 10)], 0.1, half)
    if x.is_cuda:
        from quantkit.gguf import kernels

        return kernels.fit_symmetric(x, weights, half, wanted, EMPTY)
    peak = extreme(x)
    empty = peak.abs() < EMPTY
    peak.masked_fill_(empty, 1)
    weighted = weights * x

    def rounded(inverse: torch.Tensor) -> torch.Tensor:
        return (inverse * x).round_().clamp_(-half, half - 1)

    def sums(inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        integers = rounded(inverse)
        square = ordered_sum((weights * integers).mul_(integers))
        return ordered_sum(integers.mul_(weighted)), square

    inverse = divide(-half, peak)
    product, square = sums(inverse)
    scale = divide_or_zero(product, square)
    best = scale * product
    for factor in wanted:
        candidate = divide(-factor, peak)
        product, square = sums(candidate)
        better = (square > 0) & (product * product > best * square)
        inverse = torch.where(better, candidate, inverse)
        scale = torch.where(better, product / square, scale)
        best = torch.where(better, scale * product, best)
    return scale.masked_fill_(empty, 0), rounded(inverse).add_(half).masked_fill_(empty, 0)


def fit_affine(
    x: torch.Tensor,
    weights: torch.Tensor,
    top: int,
    factors: Sequence[float],
    absolute: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each block's scale, its minimum (never above zero) and its levels of 0 ... top.

    Candidates stretch the range: each factor rounds x to levels, a weighted line fit through these
    gives the scale and the minimum, and the least weighted error wins, squared or `absolute`. A
    minimum that is found replaces the old one for the candidates that follow. (ggml's
    make_qkx2_quants and make_qkx3_quants)
    """
    if x.is_cuda:
        from quantkit.gguf import kernels

        return kernels.fit_affine(x, weights, top, factors, absolute)
    low, high = limits(x)
    low = low.masked_fill_(low > 0, 0)
    total, total_x = ordered_sum(weights), ordered_sum(weights * x)

    def rounded(inverse: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        # Where the range is zero, or too small to invert, all levels are zero.
        inverse = inverse.nan_to_num(posinf=0.0, neginf=0.0)
        return (x - low).mul_(inverse).round_().clamp_(0, top)

    def error(levels: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Overwrites the levels."""
        change = levels.mul_(scale).add_(low).sub_(x)
        return ordered_sum((change.abs_() if absolute else change.square_()).mul_(weights))

    inverse, start = divide(top, high - low), low
    scale = divide(1, inverse)
    best = error(rounded(inverse, low), scale, low)
    for factor in factors:
        candidate = divide(factor, high - low)
        levels = rounded(candidate, low)
        weighted = weights * levels
        sum_l, sum_l2 = ordered_sum(weighted), ordered_sum(weighted * levels)
        sum_xl = ordered_sum(weighted.mul_(x))
        determinant = total * sum_l2 - sum_l * sum_l
        slope = (total * sum_xl - total_x * sum_l) / determinant
        foot = (sum_l2 * total_x - sum_l * sum_xl) / determinant
        above = foot > 0
        slope = torch.where(above, sum_xl / sum_l2, slope)
        foot = foot.masked_fill_(above, 0)
        found = error(levels, slope, foot)
        better = (determinant > 0) & (found < best)
        inverse, start = torch.where(better, candidate, inverse), torch.where(better, low, start)
        scale, low = torch.where(better, slope, scale), torch.where(better, foot, low)
        best = torch.where(better, found, best)
    return scale, low, rounded(inverse, start)


def fit_by_descent(x: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `fit_symmetric`, weighted by x squared, but from one start by moving single levels.

    (ggml's make_q3_quants)
    """
    if x.is_cuda:
        from quantkit.gguf import kernels

        return kernels.fit_by_descent(x, half, EMPTY)
    peak = extreme(x)
    empty = peak.abs() < EMPTY
    levels = nearest(x * divide(-half, peak)).clamp_(-half, half - 1)
    scale, levels = _descend(x, x * x, levels, half - 1, signed=True)
    return scale.masked_fill_(empty, 0), (levels + half).masked_fill_(empty, 0)


def fit_positive(
    x: torch.Tensor, weights: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block's scale and its levels of 0 ... top; x >= 0 is level * scale.

    The best of nine scales is the start, then single levels move. A negative x, which `fit_affine`
    produces when hardly any number of a block counts, may get a negative level; ggml keeps levels
    in bytes, so 256 is added, here as well. (ggml's make_qp_quants)
    """
    tried = candidates([*range(-4, 0), *range(1, 5)], 0.1, top)
    if x.is_cuda:
        from quantkit.gguf import kernels

        return kernels.fit_positive(x, weights, top, tried, EMPTY)
    largest = x.amax(0)
    empty = largest < EMPTY

    def error(levels: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        change = x - divide(1, inverse) * levels
        return ordered_sum(weights * change * change)

    inverse = divide(top, largest)
    best = error(nearest(inverse * x) & 255, inverse)
    for wanted in tried:
        candidate = divide(wanted, largest)
        found = error(nearest(candidate * x).clamp_(max=top), candidate)
        better = found < best
        inverse = torch.where(better, candidate, inverse)
        best = torch.where(better, found, best)
    levels = nearest(inverse * x).clamp_(max=top)
    scale, levels = _descend(x, weights, levels, top, signed=False)
    return scale.masked_fill_(empty, 0), levels.masked_fill_(empty, 0)


def _descend(
    x: torch.Tensor, weights: torch.Tensor, levels: torch.Tensor, top: int, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Five passes over the numbers, each moving a level where that improves the block's fit."""
    weighted = weights * x
    product, square = ordered_sum(weighted * levels), ordered_sum(weights * levels * levels)
    chosen = list(levels if signed else levels & 255)
    numbers = list(zip(x, weights, weighted, strict=True))
    for _ in range(5):
        for i, (number, weight, both) in enumerate(numbers):
            level = chosen[i]
            rest = product - both * level
            rest_square = square - weight * level * level
            moved = nearest(number * rest_square / rest)
            moved = moved.clamp_(-top - 1, top) if signed else moved.clamp_(max=top)
            new_product = rest + both * moved
            new_square = rest_square + weight * moved * moved
            better = (rest > 0) & (moved != level) & (new_square > 0)
            if not signed:
                better &= rest_square > 0
            better &= new_product * new_product * square > product * product * new_square
            chosen[i] = torch.where(better, moved if signed else moved & 255, level)
            product = torch.where(better, new_product, product)
            square = torch.where(better, new_square, square)
    return torch.where(square > 0, product / square, 0.0), torch.stack(chosen)
