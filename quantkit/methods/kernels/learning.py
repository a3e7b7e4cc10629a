"""A step of codes and scales in two kernels per linear; the twins are in `onepass.tuning`.

A weight is a row of tiles with one scale each. A program holds some tiles, wide ones in several
parts. Without fused multiply-adds every number is the twin's own, bit for bit; only the sum over a
tile is in another order, which is always the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

WIDEST = 1024
"""Columns of a tile that a program holds at once ..."""
HELD = 2048
"""... and numbers of all its tiles together."""


class Linear(NamedTuple):
    """What is learnt of a linear, and how it is stored; all contiguous."""

    codes: torch.Tensor
    """[rows, tiles per row, columns per tile], in float32."""
    factors: torch.Tensor
    scale: torch.Tensor
    """Before the first step, as stored."""
    zero_point: torch.Tensor | None
    limits: tuple[float, float]


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(  # type: ignore[no-untyped-def]
    scale_ptr, zero_ptr, n_tiles, ZERO: tl.constexpr, TILES: tl.constexpr
):
    """A program's tiles, which of them exist, their scales and zero points."""
    tiles = (tl.program_id(0) * TILES + tl.arange(0, TILES)).to(tl.int64)
    present = tiles < n_tiles
    unit = tl.load(scale_ptr + tiles, present, 1.0).to(tl.float32)
    zero = tl.zeros_like(unit)
    if ZERO:
        zero = tl.load(zero_ptr + tiles, present, 0).to(tl.float32)
    return tiles, present, unit, zero


@triton.jit  # type: ignore[untyped-decorator]
def _part(  # type: ignore[no-untyped-def]
    tiles, present, start, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Where some columns of tiles are, and which of them exist."""
    columns = start + tl.arange(0, BLOCK)
    at = tiles[:, None] * SIZE + columns[None, :]
    return at, present[:, None] & (columns < SIZE)[None, :]


@triton.jit
def _plain(code, zero, bottom, top):  # type: ignore[no-untyped-def]
    """What scales are multiplied by. As integers, zeros have no sign."""
    value = libdevice.rint(tl.minimum(tl.maximum(code, bottom), top))
    return value.to(tl.int8).to(tl.float32) - zero[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    mean_ptr, slope, inside, kept, added, FRESH: tl.constexpr
):
    """Update means, rounded after the product and after the sum, as torch does it in place."""
    dtype = mean_ptr.dtype.element_ty
    if not FRESH:
        mean = tl.load(mean_ptr, inside, 0.0).to(tl.float32) * kept
        slope = mean.to(dtype).to(tl.float32) + slope * added
    tl.store(mean_ptr, slope.to(dtype), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _learn(  # type: ignore[no-untyped-def]
    gradient_ptr, code_ptr, factor_ptr, scale_ptr, zero_ptr, scale_mean_ptr, code_mean_ptr,
    n_tiles, bottom, top, kept, added,
    ZERO: tl.constexpr, FRESH: tl.constexpr,
    SIZE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles, present, unit, zero = _tiles(scale_ptr, zero_ptr, n_tiles, ZERO, TILES)
    step = unit * tl.load(factor_ptr + tiles, present, 1.0)
    total = tl.zeros((TILES, BLOCK), tl.float32)
    for start in range(0, SIZE, BLOCK):
        at, inside = _part(tiles, present, start, SIZE, BLOCK)
        gradient = tl.load(gradient_ptr + at, inside, 0.0).to(tl.float32)
        code = tl.load(code_ptr + at, inside, 0.0)
        total += gradient * _plain(code, zero, bottom, top)
        _count(code_mean_ptr + at, gradient * step[:, None], inside, kept, added, FRESH)
    _count(scale_mean_ptr + tiles, tl.sum(total, 1) * unit, present, kept, added, FRESH)


@triton.jit
def _sign(slope):  # type: ignore[no-untyped-def]
    """Zero for NaN, as in torch."""
    slope = slope.to(tl.float32)
    return tl.where(slope > 0, 1.0, tl.where(slope < 0, -1.0, 0.0))


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    weight_ptr, moved_ptr, code_ptr, factor_ptr, scale_ptr, zero_ptr, scale_slope_ptr,
    code_slope_ptr, n_tiles, bottom, top, by_codes, by_scales,
    ZERO: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles, present, unit, zero = _tiles(scale_ptr, zero_ptr, n_tiles, ZERO, TILES)
    sign = _sign(tl.load(scale_slope_ptr + tiles, present, 0.0))
    factor = tl.load(factor_ptr + tiles, present, 1.0) - sign * by_scales
    # Not in place: several threads hold a tile's factor, and one may read what another has written.
    tl.store(moved_ptr + tiles, factor, present)
    # The nearest scale that can be stored; see `Number.nearest_scale`.
    stored = (unit * factor).to(scale_ptr.dtype.element_ty).to(tl.float32)
    step = tl.where((stored * unit > 0.0) & (tl.abs(stored) < float("inf")), stored, unit)
    for start in range(0, SIZE, BLOCK):
        at, inside = _part(tiles, present, start, SIZE, BLOCK)
        signs = _sign(tl.load(code_slope_ptr + at, inside, 0.0))
        code = tl.load(code_ptr + at, inside, 0.0) - signs * by_codes
        code = tl.minimum(tl.maximum(code, bottom), top)
        tl.store(code_ptr + at, code, inside)
        weight = _plain(code, zero, bottom, top) * step[:, None]
        tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), inside)


def learn(
    linear: Linear, gradient: torch.Tensor, means: list[torch.Tensor], momentum: float
) -> None:
    """Count a gradient with respect to the weights in the mean slopes of scales and codes; without
    momentum, replace them.
    """
    of_scales, of_codes = means
    grid, sizes = _sizes(linear)
    _learn[grid](
        gradient.contiguous(), *_pointers(linear), of_scales, of_codes,
        linear.factors.numel(), *linear.limits, momentum, 1 - momentum,
        FRESH=momentum == 0, **sizes,
    )  # fmt: skip


def move(
    linear: Linear, slopes: list[torch.Tensor], by: tuple[float, float], weight: torch.Tensor
) -> torch.Tensor:
    """Move codes by so much against the signs of slopes, and return the factors moved likewise;
    `weight` becomes what they represent.
    """
    assert weight.is_contiguous()
    of_scales, of_codes = slopes
    grid, sizes = _sizes(linear)
    moved = torch.empty_like(linear.factors)
    _move[grid](
        weight, moved, *_pointers(linear), of_scales, of_codes,
        linear.factors.numel(), *linear.limits, *by, **sizes,
    )  # fmt: skip
    return moved


def _pointers(linear: Linear) -> tuple[torch.Tensor, ...]:
    codes, factors, scale, zero, _ = linear
    return codes, factors, scale, scale if zero is None else zero


def _sizes(linear: Linear) -> tuple[tuple[int], dict[str, int | bool]]:
    """The grid, and what is known when the kernel is compiled."""
    size = linear.codes.shape[-1]
    block = min(WIDEST, triton.next_power_of_2(size))
    tiles = HELD // block
    return (triton.cdiv(linear.factors.numel(), tiles),), {
        "ZERO": linear.zero_point is not None, "SIZE": size, "TILES": tiles, "BLOCK": block,
        "num_warps": 4, "enable_fp_fusion": False,
    }  # fmt: skip
