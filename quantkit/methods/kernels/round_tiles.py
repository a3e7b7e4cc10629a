"""Rounding judged tile by tile in one read of the weight; the twins are in `quantize.rounding`.

A program holds some rows of one tile. Rows with one scale each are split into tiles as well, and
the errors of a row's tiles are added up afterwards.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from quantkit import grid
from quantkit.methods.kernels.tiles import tile_of
from quantkit.schemes import WeightScheme

ROWS = 32
JUDGED = 64
"""Rows of a tile that are multiplied by its Gram matrix at a time."""


@triton.jit  # type: ignore[untyped-decorator]
def _round(  # type: ignore[no-untyped-def]
    weight_ptr, smoothing_ptr, scale_ptr, zero_ptr, out_ptr,
    n_rows, n_columns, scale_stride, tiles_per_scale, bottom, top, inverse, empty,
    SMOOTH: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    rows, inside, tile, at, weight = tile_of(weight_ptr, n_rows, n_columns, ROWS, SIZE)
    if SMOOTH:
        smoothing = tl.load(smoothing_ptr + tile * SIZE + tl.arange(0, SIZE))[None, :]
        smoothed = weight * smoothing
        low = tl.minimum(tl.min(smoothed, 1), 0.0)
        high = tl.maximum(tl.max(smoothed, 1), 0.0)
        # Times the inverse, as torch divides by a number: the largest weights of a tile without
        # zero points lie halfway between two numbers, and the last bit decides.
        if ZERO:
            scale = (high - low) * inverse
            scale = tl.where(scale == 0.0, empty, scale)
            zero = bottom - tl.div_rn(low, scale)
            zero = libdevice.rint(tl.minimum(tl.maximum(zero, bottom), top))
        else:
            scale = tl.maximum(-low, high) * inverse
            scale = tl.where(scale == 0.0, empty, scale)
            zero = tl.zeros_like(scale)
    else:
        smoothed = weight
        at_scale = rows * scale_stride + tile // tiles_per_scale
        scale = tl.load(scale_ptr + at_scale, inside, 1.0)
        zero = tl.zeros_like(scale)
        if ZERO:
            zero = tl.load(zero_ptr + at_scale, inside, 0.0)
    value = libdevice.rint(tl.div_rn(smoothed, scale[:, None]) + zero[:, None])
    value = tl.minimum(tl.maximum(value, bottom), top)
    rounded = (value - zero[:, None]) * scale[:, None]
    if SMOOTH:
        rounded = tl.div_rn(rounded, smoothing)
    change = rounded - weight
    tl.store(out_ptr + at, change.to(out_ptr.dtype.element_ty), inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _judge(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, zero_ptr, judge_ptr, out_ptr,
    n_candidates, n_rows, n_columns, n_tiles, n_scales, bottom, top,
    ZERO: tl.constexpr, GRAM: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    rows, present, tile, _, weight = tile_of(weight_ptr, n_rows, n_columns, ROWS, SIZE)
    within = tl.arange(0, SIZE)
    if GRAM:
        at_gram = tile * SIZE * SIZE + within[:, None] * SIZE + within[None, :]
        judge = tl.load(judge_ptr + at_gram)
    else:
        judge = tl.load(judge_ptr + tile * SIZE + within)[None, :]
    place = tile // (n_tiles // n_scales)
    zero = tl.zeros((ROWS,), tl.float32)
    for candidate in range(n_candidates):
        at_row = candidate * n_rows + rows.to(tl.int64)
        at_scale = at_row * n_scales + place
        scale = tl.load(scale_ptr + at_scale, present, 1.0).to(tl.float32)
        if ZERO:
            zero = tl.load(zero_ptr + at_scale, present, 0).to(tl.float32)
        wide = tl.broadcast_to(scale[:, None], (ROWS, SIZE))
        value = libdevice.rint(tl.div_rn(weight, wide) + zero[:, None])
        value = tl.minimum(tl.maximum(value, bottom), top)
        change = (value - zero[:, None]) * wide - weight
        if GRAM:
            narrow = change.to(tl.bfloat16)
            product = tl.dot(narrow, judge, out_dtype=tl.float32)
            error = tl.sum(product * narrow.to(tl.float32), 1)
        else:
            error = tl.sum(change * change * judge, 1)
        tl.store(out_ptr + at_row * n_tiles + tile, error, present)


def _launch(
    weight: torch.Tensor,
    scheme: WeightScheme,
    out: torch.Tensor,
    size: int,
    smoothing: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
) -> None:
    n_rows, n_columns = weight.shape
    bottom, top = grid.limits(scheme)
    inverse = (2.0 if scheme.symmetric else 1.0) / (top - bottom)
    n_scales = 1 if scale is None else scale.shape[1]
    any_pointer = weight  # placeholder for what a variant does not read
    scales = any_pointer if scale is None else scale.float().contiguous()
    zeros = any_pointer if zero_point is None else zero_point.float().contiguous()
    _round[(triton.cdiv(n_rows, ROWS), n_columns // size)](
        weight,
        any_pointer if smoothing is None else smoothing.contiguous(),
        scales,
        zeros,
        out,
        n_rows, n_columns, n_scales, n_columns // size // n_scales,
        bottom, top, inverse, torch.finfo(torch.float32).eps,
        SMOOTH=smoothing is not None, ZERO=not scheme.symmetric,
        ROWS=ROWS, SIZE=size, num_warps=4,
    )  # fmt: skip


def _tile_size(weight: torch.Tensor, scheme: WeightScheme) -> int:
    if isinstance(scheme.group_size, int):
        return scheme.group_size
    return next(size for size in (128, 64, 32) if weight.shape[1] % size == 0)


def change(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: WeightScheme,
) -> torch.Tensor:
    """The rounded weight minus the weight, in bf16."""
    out = torch.empty_like(weight, dtype=torch.bfloat16)
    size = _tile_size(weight, scheme)
    _launch(weight, scheme, out, size, scale=scale, zero_point=zero_point)
    return out


def smoothed_change(
    weight: torch.Tensor, smoothing: torch.Tensor, scheme: WeightScheme
) -> torch.Tensor:
    """The change in bf16 when columns are multiplied, rounded and divided again."""
    out = torch.empty_like(weight, dtype=torch.bfloat16)
    _launch(weight, scheme, out, _tile_size(weight, scheme), smoothing=smoothing)
    return out


def errors(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    judge: torch.Tensor,
    scheme: WeightScheme,
) -> torch.Tensor:
    """The error of every tile's change d, for every candidate [candidates, rows, scales].

    d G d^T, with the tiles' Gram matrices [tiles, size, size] in bf16 to judge by; or the squares
    of d weighted by the importance of columns.
    """
    by_gram = judge.ndim == 3
    n_candidates, n_rows, n_scales = scale.shape
    n_columns, size = weight.shape[1], _tile_size(weight, scheme)
    n_tiles = n_columns // size
    rows = JUDGED if by_gram else ROWS
    out = torch.empty(n_candidates, n_rows, n_tiles, device=weight.device)
    _judge[(triton.cdiv(n_rows, rows), n_tiles)](
        weight, scale.contiguous(), out if zero_point is None else zero_point.contiguous(),
        judge.contiguous(), out,
        n_candidates, n_rows, n_columns, n_tiles, n_scales, *grid.limits(scheme),
        ZERO=zero_point is not None, GRAM=by_gram, ROWS=rows, SIZE=size, num_warps=4,
    )  # fmt: skip
    return out if n_tiles == n_scales else out.view(*scale.shape, -1).sum(-1)
