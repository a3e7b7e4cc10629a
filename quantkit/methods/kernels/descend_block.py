"""One block of coordinate descent in one kernel; its torch twin is `methods.refine.descend_block`.

As in `gptq_block`, a program keeps a tile of rows with all columns of the block in registers.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _descend(  # type: ignore[no-untyped-def]
    slope_ptr, chosen_ptr, moved_ptr, gram_ptr, scale_ptr, tile_ptr,
    n_rows, n_columns, slope_stride, chosen_stride, gram_stride, scale_stride,
    bottom, top,
    IS_FP4: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    present = rows < n_rows
    inside = present[:, None] & (columns[None, :] < n_columns)
    at_chosen = rows[:, None] * chosen_stride + columns[None, :]
    slope = tl.load(slope_ptr + rows[:, None] * slope_stride + columns[None, :], inside, 0.0)
    chosen = tl.load(chosen_ptr + at_chosen, inside, 0).to(tl.float32)
    moved = tl.zeros_like(slope)
    for j in range(n_columns):
        here = columns[None, :] == j
        own = tl.sum(tl.where(here, slope, 0.0), 1)
        code = tl.sum(tl.where(here, chosen, 0.0), 1)
        scale = tl.load(scale_ptr + rows * scale_stride + tl.load(tile_ptr + j), present, 1.0)
        gram = tl.load(gram_ptr + j * gram_stride + columns, columns < n_columns, 0.0)
        pivot = tl.load(gram_ptr + j * gram_stride + j)
        before = code
        if IS_FP4:
            # The sign is in bit 3 of a code.
            size = tl.where(code >= 8.0, code - 8.0, code)
            before = tl.maximum(0.5 * size, tl.maximum(size - 2.0, 2.0 * size - 8.0))
            before = tl.where(code >= 8.0, -before, before)
        vertex = before - tl.div_rn(own, tl.where(pivot > 0.0, pivot, 1.0) * scale)
        if IS_FP4:
            # Steps of 0.5 up to 2, of 1 up to 4, of 2 beyond: the least is the right code.
            size = tl.minimum(tl.abs(vertex), top)
            after = tl.minimum(libdevice.rint(2.0 * size), libdevice.rint(size) + 2.0)
            after = tl.minimum(after, libdevice.rint(0.5 * size) + 4.0)
            value = tl.maximum(0.5 * after, tl.maximum(after - 2.0, 2.0 * after - 8.0))
            value = tl.where(vertex < 0.0, -value, value)
            stored = tl.where(vertex < 0.0, after + 8.0, after)
        else:
            value = tl.minimum(tl.maximum(libdevice.rint(vertex), bottom), top)
            stored = value
        # A channel that was never active keeps its codes.
        change = tl.where(pivot > 0.0, (value - before) * scale, 0.0)
        stored = tl.where(pivot > 0.0, stored, code)
        slope += change[:, None] * gram[None, :]
        chosen = tl.where(here, stored[:, None], chosen)
        moved = tl.where(here, change[:, None], moved)
    tl.store(chosen_ptr + at_chosen, chosen.to(tl.int8), inside)
    tl.store(moved_ptr + rows[:, None] * n_columns + columns[None, :], moved, inside)


def descend_block(
    slope: torch.Tensor,
    chosen: torch.Tensor,
    gram: torch.Tensor,
    scale: torch.Tensor,
    tile: torch.Tensor,
    bottom: float,
    top: float,
    is_fp4: bool = False,
) -> torch.Tensor:
    """Move the codes of one block in turn, each to its best; returns how far weights moved."""
    n_rows, n_columns = slope.shape
    moved = torch.empty(n_rows, n_columns, device=slope.device)
    _descend[(triton.cdiv(n_rows, ROWS),)](
        slope, chosen, moved, gram, scale, tile,
        n_rows, n_columns, slope.stride(0), chosen.stride(0), gram.stride(0), scale.stride(0),
        bottom, top,
        IS_FP4=is_fp4, ROWS=ROWS, COLUMNS=triton.next_power_of_2(n_columns), num_warps=4,
    )  # fmt: skip
    return moved
