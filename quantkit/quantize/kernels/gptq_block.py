"""One block of GPTQ columns in one kernel; its torch twin is `methods.gptq.update_block`.

A program keeps a tile of rows with all columns of the block in registers and walks over the
columns, so that the block is read and written once instead of once a column.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weight_ptr, chosen_ptr, error_ptr, upper_ptr, scale_ptr, zero_ptr,
    n_rows, n_columns, weight_stride, chosen_stride, upper_stride, scale_stride,
    bottom, top,
    HAS_ZERO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
    at_weight = rows[:, None] * weight_stride + columns[None, :]
    at_scale = rows[:, None] * scale_stride + columns[None, :]
    weight = tl.load(weight_ptr + at_weight, inside, 0.0)
    scales = tl.load(scale_ptr + at_scale, inside, 1.0)
    zeros = tl.zeros_like(weight)
    if HAS_ZERO:
        zeros = tl.load(zero_ptr + at_scale, inside, 0.0)
    chosen = tl.zeros_like(weight)
    errors = tl.zeros_like(weight)
    for j in range(n_columns):
        here = columns[None, :] == j
        column = tl.sum(tl.where(here, weight, 0.0), 1)
        scale = tl.sum(tl.where(here, scales, 0.0), 1)
        zero = tl.sum(tl.where(here, zeros, 0.0), 1)
        upper = tl.load(upper_ptr + j * upper_stride + columns, columns < n_columns, 0.0)
        pivot = tl.load(upper_ptr + j * upper_stride + j)
        value = libdevice.rint(tl.div_rn(column, scale) + zero)
        value = tl.minimum(tl.maximum(value, bottom), top)
        error = tl.div_rn(column - (value - zero) * scale, pivot)
        later = columns[None, :] > j
        weight -= tl.where(later, error[:, None] * upper[None, :], 0.0)
        chosen = tl.where(here, value[:, None], chosen)
        errors = tl.where(here, error[:, None], errors)
    tl.store(chosen_ptr + rows[:, None] * chosen_stride + columns[None, :], chosen, inside)
    tl.store(error_ptr + rows[:, None] * n_columns + columns[None, :], errors, inside)


def update_block(
    weight: torch.Tensor,
    chosen: torch.Tensor,
    upper: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bottom: float,
    top: float,
) -> torch.Tensor:
    """Round the columns of one block in turn; fills `chosen` and returns the scaled errors."""
    n_rows, n_columns = weight.shape
    errors = torch.empty(n_rows, n_columns, device=weight.device)
    _update[(triton.cdiv(n_rows, ROWS),)](
        weight, chosen, errors, upper, scales, zeros if zeros is not None else scales,
        n_rows, n_columns, weight.stride(0), chosen.stride(0), upper.stride(0), scales.stride(0),
        bottom, top,
        HAS_ZERO=zeros is not None, ROWS=ROWS, COLUMNS=triton.next_power_of_2(n_columns),
        num_warps=4,
    )  # fmt: skip
    return errors
