"""Sums and maxima of magnitudes per column in one read; torch twin: `add_magnitudes_`.

A program scans some rows of some columns. Maxima are the same in any order, so programs raise them
directly; partial sums are added up afterwards. NaN shows up in the Gram matrix.
"""

import torch
import triton
import triton.language as tl

COLUMNS = 128
STEP = 32
ROWS = 512


@triton.jit  # type: ignore[untyped-decorator]
def _magnitudes(  # type: ignore[no-untyped-def]
    values_ptr, sums_ptr, largest_ptr, n_rows, n_columns, stride,
    ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n_columns
    sums = tl.zeros((STEP, COLUMNS), tl.float32)
    largest = tl.zeros((STEP, COLUMNS), tl.float32)
    for start in range(0, ROWS, STEP):
        rows = tl.program_id(1) * ROWS + start + tl.arange(0, STEP)
        at = rows[:, None].to(tl.int64) * stride + columns[None, :]
        present = (rows < n_rows)[:, None] & inside[None, :]
        values = tl.abs(tl.load(values_ptr + at, present, 0.0).to(tl.float32))
        sums += values
        largest = tl.maximum(largest, values)
    at_part = tl.program_id(1) * n_columns + columns
    tl.store(sums_ptr + at_part, tl.sum(sums, 0), inside)
    tl.atomic_max(largest_ptr + columns, tl.max(largest, 0), inside)


def add_(total: torch.Tensor, largest: torch.Tensor, flat: torch.Tensor) -> None:
    """Add the sums of magnitudes of a matrix's columns, and raise the largest ones."""
    n_rows, n_columns = flat.shape
    if not n_rows:
        return
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    n_parts = triton.cdiv(n_rows, ROWS)
    sums = torch.empty(n_parts, n_columns, device=flat.device)
    _magnitudes[(triton.cdiv(n_columns, COLUMNS), n_parts)](
        flat, sums, largest, n_rows, n_columns, flat.stride(0),
        ROWS=ROWS, STEP=STEP, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    total += sums.sum(0)
