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
    weight_ptr, smoothing_ptr, scale_ptr, zero_ptr, importance_ptr, out_ptr,
    n_rows, n_columns, n_tiles, scale_stride, tiles_per_scale, bottom, top, inverse, empty,
    SMOOTH: tl.constexpr, ZERO: tl.constexpr, ERROR: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    rows, inside, tile, at, weight = tile_of(weight_ptr, n_rows, n_columns, ROWS, SIZE)
    columns = tile * SIZE + tl.arange(0, SIZE)
    if SMOOTH:
        smoothing = tl.load(smoothing_ptr + columns)[None, :]
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
    if ERROR:
        importance = tl.load(importance_ptr + columns)[None, :]
        error = tl.sum(change * change * importance, 1)
        tl.store(out_ptr + rows * n_tiles + tile, error, inside)
    else:
        tl.store(out_ptr + at, change.to(out_ptr.dtype.element_ty), inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _energy(  # type: ignore[no-untyped-def]
    weight_ptr, scale_ptr, zero_ptr, grams_ptr, out_ptr,
    n_rows, n_columns, n_tiles, bottom, top,
    ZERO: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    rows, present, tile, _, weight = tile_of(weight_ptr, n_rows, n_columns, ROWS, SIZE)
    within = tl.arange(0, SIZE)
    at_scale = rows * n_tiles + tile
    scale = tl.load(scale_ptr + at_scale, present, 1.0).to(tl.float32)
    zero = tl.zeros_like(scale)
    if ZERO:
        zero = tl.load(zero_ptr + at_scale, present, 0).to(tl.float32)
    wide = tl.broadcast_to(scale[:, None], (ROWS, SIZE))
    value = libdevice.rint(tl.div_rn(weight, wide) + zero[:, None])
    value = tl.minimum(tl.maximum(value, bottom), top)
    change = ((value - zero[:, None]) * wide - weight).to(tl.bfloat16)
    gram = tl.load(grams_ptr + tile * SIZE * SIZE + within[:, None] * SIZE + within[None, :])
    product = tl.dot(change, gram, out_dtype=tl.float32)
    tl.store(out_ptr + at_scale, tl.sum(product * change.to(tl.float32), 1), present)


def _launch(
    weight: torch.Tensor,
    scheme: WeightScheme,
    out: torch.Tensor,
    size: int,
    smoothing: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
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
        any_pointer if importance is None else importance.contiguous(),
        out,
        n_rows, n_columns, n_columns // size, n_scales, n_columns // size // n_scales,
        bottom, top, inverse, torch.finfo(torch.float32).eps,
        SMOOTH=smoothing is not None, ZERO=not scheme.symmetric, ERROR=importance is not None,
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


def weighted_error(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    importance: torch.Tensor,
    scheme: WeightScheme,
) -> torch.Tensor:
    """Squared change of every tile, each column weighted by its importance."""
    size = _tile_size(weight, scheme)
    rows, columns = weight.shape
    out = torch.empty(rows, columns // size, device=weight.device)
    _launch(weight, scheme, out, size, scale=scale, zero_point=zero_point, importance=importance)
    return out.view(rows, scale.shape[1], -1).sum(-1)


def smoothed_change(
    weight: torch.Tensor, smoothing: torch.Tensor, scheme: WeightScheme
) -> torch.Tensor:
    """The change in bf16 when columns are multiplied, rounded and divided again."""
    out = torch.empty_like(weight, dtype=torch.bfloat16)
    _launch(weight, scheme, out, _tile_size(weight, scheme), smoothing=smoothing)
    return out


def energies(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    grams: torch.Tensor,
    scheme: WeightScheme,
) -> torch.Tensor:
    """d G d^T of every tile's change d; `grams` is [tiles, size, size] in bf16."""
    n_tiles, size, _ = grams.shape
    n_rows, n_columns = weight.shape
    out = torch.empty(n_rows, n_tiles, device=weight.device)
    _energy[(triton.cdiv(n_rows, JUDGED), n_tiles)](
        weight, scale.contiguous(), out if zero_point is None else zero_point.contiguous(), grams,
        out, n_rows, n_columns, n_tiles, *grid.limits(scheme),
        ZERO=zero_point is not None, ROWS=JUDGED, SIZE=size, num_warps=4,
    )  # fmt: skip
    return out
