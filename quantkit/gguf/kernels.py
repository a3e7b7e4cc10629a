"""Triton kernels for GGUF's searches; their torch twins are in `gguf.search`.

Each lane searches one block from beginning to end, as ggml does: sums keep its order, and no
product is fused with a sum. Numbers are laid out as planes, so that neighbouring lanes read
neighbouring memory; a block's few numbers are read again for every candidate, from the nearest
cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

LANES = 128
MAGIC = tl.constexpr(12582912.0)
"""Adding and subtracting it rounds to the nearest integer, ties to even."""


@triton.jit
def _level(value, low, high):  # type: ignore[no-untyped-def]
    # Clamp first as well: larger numbers would not survive the rounding.
    bounded = tl.minimum(tl.maximum(value, low - 1.0), high + 1.0)
    return tl.minimum(tl.maximum((bounded + MAGIC) - MAGIC, low), high)


@triton.jit
def _finite_or_zero(value):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _peak(x_ptr, lane, inside, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    peak = tl.load(x_ptr + lane, inside, 0.0)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        peak = tl.where(tl.abs(x) > tl.abs(peak), x, peak)
    return peak


@triton.jit  # type: ignore[untyped-decorator]
def _affine_error(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, lane, inside, n, inverse, low, scale, foot, top,
    SIZE: tl.constexpr, ABSOLUTE: tl.constexpr,
):  # fmt: skip
    total = tl.zeros_like(scale)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        w = tl.load(w_ptr + i * n + lane, inside, 0.0)
        change = (_level((x - low) * inverse, 0.0, top) * scale + foot) - x
        size = tl.abs(change) if ABSOLUTE else change * change
        total = total + size * w
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _fit_affine(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, factors_ptr, scale_ptr, low_ptr, levels_ptr, n, top,
    SIZE: tl.constexpr, N_FACTORS: tl.constexpr, ABSOLUTE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < n
    low = tl.load(x_ptr + lane, inside, 0.0)
    high = low
    total = tl.zeros_like(low)
    total_x = tl.zeros_like(low)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        w = tl.load(w_ptr + i * n + lane, inside, 0.0)
        low = tl.where(x < low, x, low)
        high = tl.where(x > high, x, high)
        total = total + w
        total_x = total_x + w * x
    low = tl.where(low > 0.0, 0.0, low)
    inverse = tl.div_rn(tl.zeros_like(low) + top, high - low)
    start = low
    scale = tl.div_rn(tl.zeros_like(low) + 1.0, inverse)
    best = _affine_error(
        x_ptr, w_ptr, lane, inside, n, _finite_or_zero(inverse), low, scale, low, top,
        SIZE, ABSOLUTE,
    )  # fmt: skip
    for f in range(N_FACTORS):
        candidate = tl.div_rn(tl.zeros_like(low) + tl.load(factors_ptr + f), high - low)
        step = _finite_or_zero(candidate)
        sum_l = tl.zeros_like(low)
        sum_l2 = tl.zeros_like(low)
        sum_xl = tl.zeros_like(low)
        for i in range(SIZE):
            x = tl.load(x_ptr + i * n + lane, inside, 0.0)
            w = tl.load(w_ptr + i * n + lane, inside, 0.0)
            level = _level((x - low) * step, 0.0, top)
            weighted = w * level
            sum_l = sum_l + weighted
            sum_l2 = sum_l2 + weighted * level
            sum_xl = sum_xl + weighted * x
        determinant = total * sum_l2 - sum_l * sum_l
        slope = tl.div_rn(total * sum_xl - total_x * sum_l, determinant)
        foot = tl.div_rn(sum_l2 * total_x - sum_l * sum_xl, determinant)
        above = foot > 0.0
        slope = tl.where(above, tl.div_rn(sum_xl, sum_l2), slope)
        foot = tl.where(above, 0.0, foot)
        found = _affine_error(
            x_ptr, w_ptr, lane, inside, n, step, low, slope, foot, top, SIZE, ABSOLUTE
        )
        better = (determinant > 0.0) & (found < best)
        inverse = tl.where(better, candidate, inverse)
        start = tl.where(better, low, start)
        scale = tl.where(better, slope, scale)
        low = tl.where(better, foot, low)
        best = tl.where(better, found, best)
    tl.store(scale_ptr + lane, scale, inside)
    tl.store(low_ptr + lane, low, inside)
    step = _finite_or_zero(inverse)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        tl.store(levels_ptr + i * n + lane, _level((x - start) * step, 0.0, top), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _symmetric_sums(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, lane, inside, n, inverse, half, SIZE: tl.constexpr
):  # fmt: skip
    product = tl.zeros_like(inverse)
    square = tl.zeros_like(inverse)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        w = tl.load(w_ptr + i * n + lane, inside, 0.0)
        level = _level(inverse * x, -half, half - 1.0)
        square = square + (w * level) * level
        product = product + level * (w * x)
    return product, square


@triton.jit  # type: ignore[untyped-decorator]
def _fit_symmetric(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, wanted_ptr, scale_ptr, levels_ptr, n, half, empty_below,
    SIZE: tl.constexpr, N_WANTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < n
    peak = _peak(x_ptr, lane, inside, n, SIZE)
    empty = tl.abs(peak) < empty_below
    peak = tl.where(empty, 1.0, peak)
    inverse = tl.div_rn(tl.zeros_like(peak) - half, peak)
    product, square = _symmetric_sums(x_ptr, w_ptr, lane, inside, n, inverse, half, SIZE)
    scale = tl.where(square == 0.0, 0.0, tl.div_rn(product, square))
    best = scale * product
    for f in range(N_WANTED):
        candidate = tl.div_rn(tl.zeros_like(peak) - tl.load(wanted_ptr + f), peak)
        product, square = _symmetric_sums(x_ptr, w_ptr, lane, inside, n, candidate, half, SIZE)
        better = (square > 0.0) & (product * product > best * square)
        fitted = tl.div_rn(product, square)
        inverse = tl.where(better, candidate, inverse)
        scale = tl.where(better, fitted, scale)
        best = tl.where(better, fitted * product, best)
    tl.store(scale_ptr + lane, tl.where(empty, 0.0, scale), inside)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        level = _level(inverse * x, -half, half - 1.0) + half
        tl.store(levels_ptr + i * n + lane, tl.where(empty, 0.0, level), inside)


@triton.jit
def _nearest(value):  # type: ignore[no-untyped-def]
    return ((value + MAGIC).to(tl.int32, bitcast=True) & 0x7FFFFF) - 0x400000


@triton.jit  # type: ignore[untyped-decorator]
def _descend(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, levels_ptr, lane, inside, n, top, SIZE: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    # Each lane writes and reads only its own levels, so memory serves as a private array.
    product = tl.zeros(lane.shape, tl.float32)
    square = tl.zeros(lane.shape, tl.float32)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        w = tl.load(w_ptr + i * n + lane, inside, 0.0)
        stored = tl.load(levels_ptr + i * n + lane, inside, 0)
        level = stored.to(tl.float32)
        product = product + (w * x) * level
        square = square + (w * level) * level
        if not SIGNED:
            tl.store(levels_ptr + i * n + lane, stored & 255, inside)
    for _ in range(5):
        for i in range(SIZE):
            x = tl.load(x_ptr + i * n + lane, inside, 0.0)
            w = tl.load(w_ptr + i * n + lane, inside, 0.0)
            stored = tl.load(levels_ptr + i * n + lane, inside, 0)
            level = stored.to(tl.float32)
            both = w * x
            rest = product - both * level
            rest_square = square - (w * level) * level
            moved = tl.minimum(_nearest(tl.div_rn(x * rest_square, rest)), top)
            if SIGNED:
                moved = tl.maximum(moved, -top - 1)
            other = moved.to(tl.float32)
            new_product = rest + both * other
            new_square = rest_square + (w * other) * other
            better = (rest > 0.0) & (moved != stored) & (new_square > 0.0)
            if not SIGNED:
                better = better & (rest_square > 0.0)
            better = better & (
                (new_product * new_product) * square > (product * product) * new_square
            )
            kept = moved if SIGNED else moved & 255
            tl.store(levels_ptr + i * n + lane, tl.where(better, kept, stored), inside)
            product = tl.where(better, new_product, product)
            square = tl.where(better, new_square, square)
    return tl.where(square > 0.0, tl.div_rn(product, square), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _positive_error(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, lane, inside, n, inverse, top, SIZE: tl.constexpr, WRAPS: tl.constexpr
):  # fmt: skip
    step = tl.div_rn(tl.zeros_like(inverse) + 1.0, inverse)
    total = tl.zeros_like(inverse)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        w = tl.load(w_ptr + i * n + lane, inside, 0.0)
        level = _nearest(inverse * x)
        level = level & 255 if WRAPS else tl.minimum(level, top)
        change = x - step * level.to(tl.float32)
        total = total + (w * change) * change
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _fit_positive(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, wanted_ptr, scale_ptr, levels_ptr, n, top, empty_below,
    SIZE: tl.constexpr, N_WANTED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < n
    largest = tl.load(x_ptr + lane, inside, 0.0)
    for i in range(SIZE):
        largest = tl.maximum(largest, tl.load(x_ptr + i * n + lane, inside, 0.0))
    empty = largest < empty_below
    inverse = tl.div_rn(tl.zeros_like(largest) + top.to(tl.float32), largest)
    best = _positive_error(x_ptr, w_ptr, lane, inside, n, inverse, top, SIZE, True)
    for f in range(N_WANTED):
        candidate = tl.div_rn(tl.zeros_like(largest) + tl.load(wanted_ptr + f), largest)
        found = _positive_error(x_ptr, w_ptr, lane, inside, n, candidate, top, SIZE, False)
        better = found < best
        inverse = tl.where(better, candidate, inverse)
        best = tl.where(better, found, best)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        tl.store(levels_ptr + i * n + lane, tl.minimum(_nearest(inverse * x), top), inside)
    scale = _descend(x_ptr, w_ptr, levels_ptr, lane, inside, n, top, SIZE, False)
    tl.store(scale_ptr + lane, tl.where(empty, 0.0, scale), inside)
    for i in range(SIZE):
        level = tl.load(levels_ptr + i * n + lane, inside, 0)
        tl.store(levels_ptr + i * n + lane, tl.where(empty, 0, level), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _fit_by_descent(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, levels_ptr, n, half, empty_below,
    SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = lane < n
    peak = _peak(x_ptr, lane, inside, n, SIZE)
    empty = tl.abs(peak) < empty_below
    inverse = tl.div_rn(tl.zeros_like(peak) - half.to(tl.float32), peak)
    for i in range(SIZE):
        x = tl.load(x_ptr + i * n + lane, inside, 0.0)
        level = tl.minimum(tl.maximum(_nearest(x * inverse), -half), half - 1)
        tl.store(levels_ptr + i * n + lane, level, inside)
    scale = _descend(x_ptr, w_ptr, levels_ptr, lane, inside, n, half - 1, SIZE, True)
    tl.store(scale_ptr + lane, tl.where(empty, 0.0, scale), inside)
    for i in range(SIZE):
        level = tl.load(levels_ptr + i * n + lane, inside, 0) + half
        tl.store(levels_ptr + i * n + lane, tl.where(empty, 0, level), inside)


def fit_affine(
    x: torch.Tensor,
    weights: torch.Tensor,
    top: int,
    factors: Sequence[float],
    absolute: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `search.fit_affine`."""
    x, weights = x.contiguous(), weights.expand_as(x).contiguous()
    n = x[0].numel()
    scale, low, levels = torch.empty_like(x[0]), torch.empty_like(x[0]), torch.empty_like(x)
    _fit_affine[(triton.cdiv(n, LANES),)](
        x, weights, _numbers(factors, x), scale, low, levels, n, float(top),
        len(x), len(factors), absolute, LANES, enable_fp_fusion=False,
    )  # fmt: skip
    return scale, low, levels


def fit_symmetric(
    x: torch.Tensor, weights: torch.Tensor, half: int, wanted: Sequence[float], empty: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `search.fit_symmetric`."""
    x, weights = x.contiguous(), weights.expand_as(x).contiguous()
    n = x[0].numel()
    scale, levels = torch.empty_like(x[0]), torch.empty_like(x)
    _fit_symmetric[(triton.cdiv(n, LANES),)](
        x, weights, _numbers(wanted, x), scale, levels, n, float(half), empty,
        len(x), len(wanted), LANES, enable_fp_fusion=False,
    )  # fmt: skip
    return scale, levels


def fit_positive(
    x: torch.Tensor, weights: torch.Tensor, top: int, wanted: Sequence[float], empty: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `search.fit_positive`."""
    x, weights = x.contiguous(), weights.expand_as(x).contiguous()
    n = x[0].numel()
    scale, levels = torch.empty_like(x[0]), torch.empty_like(x, dtype=torch.int32)
    _fit_positive[(triton.cdiv(n, LANES),)](
        x, weights, _numbers(wanted, x), scale, levels, n, top, empty,
        len(x), len(wanted), LANES, enable_fp_fusion=False,
    )  # fmt: skip
    return scale, levels


def fit_by_descent(x: torch.Tensor, half: int, empty: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `search.fit_by_descent`."""
    x = x.contiguous()
    n = x[0].numel()
    scale, levels = torch.empty_like(x[0]), torch.empty_like(x, dtype=torch.int32)
    _fit_by_descent[(triton.cdiv(n, LANES),)](
        x, x * x, scale, levels, n, half, empty, len(x), LANES, enable_fp_fusion=False
    )
    return scale, levels


def _numbers(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
