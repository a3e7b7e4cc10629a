"""One block of GPTQ columns in one kernel; its torch twin is `methods.gptq.update_block`.

A program keeps a tile of rows with all columns of the block in registers and iterates over the
columns, so that the block is read and written once instead of once per column. What the next column
needs is prefetched. Several weights of one shape, each with its own factor, are the second
dimension of the grid.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from quantkit.numbers.kernels import fp4_code, nearest_fp4

ROWS = 16
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weight_ptr, chosen_ptr, error_ptr, upper_ptr, scale_ptr, zero_ptr, tile_ptr,
    n_rows, n_columns, weight_stride, chosen_stride, upper_stride, scale_stride,
    weight_batch, chosen_batch, upper_batch, scale_batch, tile_batch,
    bottom, top,
    HAS_ZERO: tl.constexpr, IS_FP4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1).to(tl.int64)
    weight_ptr += which * weight_batch
    chosen_ptr += which * chosen_batch
    error_ptr += which * n_rows * n_columns
    upper_ptr += which * upper_batch
    scale_ptr += which * scale_batch
    zero_ptr += which * scale_batch
    tile_ptr += which * tile_batch
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    present = rows < n_rows
    inside = present[:, None] & (columns[None, :] < n_columns)
    weight = tl.load(weight_ptr + rows[:, None] * weight_stride + columns[None, :], inside, 0.0)
    chosen = tl.zeros_like(weight)
    errors = tl.zeros_like(weight)
    in_block = columns < n_columns
    zero = tl.zeros_like(rows).to(tl.float32)
    next_zero = zero
    at_scale = rows * scale_stride + tl.load(tile_ptr)
    next_scale = tl.load(scale_ptr + at_scale, present, 1.0)
    if HAS_ZERO:
        next_zero = tl.load(zero_ptr + at_scale, present, 0.0)
    next_upper = tl.load(upper_ptr + columns, in_block, 0.0)
    next_pivot = tl.load(upper_ptr)
    for j in range(n_columns):
        scale, zero, upper, pivot = next_scale, next_zero, next_upper, next_pivot
        after = tl.minimum(j + 1, n_columns - 1)
        at_scale = rows * scale_stride + tl.load(tile_ptr + after)
        next_scale = tl.load(scale_ptr + at_scale, present, 1.0)
        if HAS_ZERO:
            next_zero = tl.load(zero_ptr + at_scale, present, 0.0)
        next_upper = tl.load(upper_ptr + after * upper_stride + columns, in_block, 0.0)
        next_pivot = tl.load(upper_ptr + after * upper_stride + after)
        here = columns[None, :] == j
        column = tl.sum(tl.where(here, weight, 0.0), 1)
        scaled = tl.div_rn(column, scale) + zero
        if IS_FP4:
            value = nearest_fp4(scaled)
            stored = fp4_code(value, scaled < 0.0)
        else:
            value = tl.minimum(tl.maximum(libdevice.rint(scaled), bottom), top)
            stored = value
        error = tl.div_rn(column - (value - zero) * scale, pivot)
        weight -= error[:, None] * upper[None, :]  # zero before j, and j itself is done
        chosen = tl.where(here, stored[:, None], chosen)
        errors = tl.where(here, error[:, None], errors)
    at_chosen = rows[:, None] * chosen_stride + columns[None, :]
    tl.store(chosen_ptr + at_chosen, chosen.to(tl.int8), inside)
    tl.store(error_ptr + rows[:, None] * n_columns + columns[None, :], errors, inside)


def update_block(
    weight: torch.Tensor,
    chosen: torch.Tensor,
    upper: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    tile: torch.Tensor,
    bottom: float,
    top: float,
    is_fp4: bool = False,
) -> torch.Tensor:
    """Round the columns of one block in turn; fills `chosen` and returns the scaled errors.

    One weight [rows, columns], or several [weights, rows, columns] with a leading dimension in all.
    """
    *several, n_rows, n_columns = weight.shape
    errors = torch.empty(weight.shape, device=weight.device)

    def by_weight(tensor: torch.Tensor) -> int:
        return tensor.stride(0) if several else 0

    _update[(triton.cdiv(n_rows, ROWS), several[0] if several else 1)](
        weight, chosen, errors, upper, scale, zero if zero is not None else scale, tile,
        n_rows, n_columns, weight.stride(-2), chosen.stride(-2), upper.stride(-2), scale.stride(-2),
        by_weight(weight), by_weight(chosen), by_weight(upper), by_weight(scale), by_weight(tile),
        bottom, top,
        HAS_ZERO=zero is not None, IS_FP4=is_fp4,
        ROWS=ROWS, COLUMNS=triton.next_power_of_2(n_columns), num_warps=WARPS,
    )  # fmt: skip
    return errors
