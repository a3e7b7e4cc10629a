"""One block of coordinate descent in one kernel; its torch twin is `methods.refine.descend_block`.

As in `gptq_block`, a program keeps a tile of rows with all columns of the block in registers, and
prefetches what the next column needs: the loop waits only for its own arithmetic. With `scales` it
also fits each scale right after the codes of its columns: what takes the twin some thirty small
operations per block is then part of the same loop.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from quantkit.numbers.kernels import fp4_code, fp4_of, nearest_fp4

ROWS = 16
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _descend(  # type: ignore[no-untyped-def]
    slope_ptr, chosen_ptr, moved_ptr, gram_ptr, step_ptr, scale_ptr, zero_ptr, tile_ptr,
    n_rows, n_columns, size,
    slope_stride, chosen_stride, moved_stride, gram_stride, scale_stride, bottom, top,
    IS_FP4: tl.constexpr, FITS: tl.constexpr, ZERO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    present = rows < n_rows
    inside = present[:, None] & (columns[None, :] < n_columns)
    at_chosen = rows[:, None] * chosen_stride + columns[None, :]
    slope = tl.load(slope_ptr + rows[:, None] * slope_stride + columns[None, :], inside, 0.0)
    chosen = tl.load(chosen_ptr + at_chosen, inside, 0).to(tl.float32)
    moved = tl.zeros_like(slope)
    plain = tl.zeros_like(slope)  # the numbers of the present scale's columns
    weighed = tl.zeros_like(slope)  # the same times the Gram matrix
    in_block = columns < n_columns
    next_scale = rows * scale_stride + tl.load(tile_ptr)
    next_step = tl.load(step_ptr + next_scale, present, 1.0)
    next_code = tl.load(chosen_ptr + rows * chosen_stride, present, 0).to(tl.float32)
    next_gram = tl.load(gram_ptr + columns, in_block, 0.0)
    next_pivot = tl.load(gram_ptr)
    for j in range(n_columns):
        at_scale, step, code, gram, pivot = next_scale, next_step, next_code, next_gram, next_pivot
        after = tl.minimum(j + 1, n_columns - 1)
        next_scale = rows * scale_stride + tl.load(tile_ptr + after)
        next_step = tl.load(step_ptr + next_scale, present, 1.0)
        next_code = tl.load(chosen_ptr + rows * chosen_stride + after, present, 0).to(tl.float32)
        next_gram = tl.load(gram_ptr + after * gram_stride + columns, in_block, 0.0)
        next_pivot = tl.load(gram_ptr + after * gram_stride + after)
        here = columns[None, :] == j
        inverse = tl.div_rn(tl.zeros_like(step) + 1.0, tl.where(pivot > 0.0, pivot, 1.0) * step)
        before = code
        if IS_FP4:
            before = fp4_of(code)
        own = tl.sum(tl.where(here, slope, 0.0), 1)
        vertex = before - own * inverse
        if IS_FP4:
            value = nearest_fp4(vertex)
            stored = fp4_code(value, vertex < 0.0)
        else:
            value = tl.minimum(tl.maximum(libdevice.rint(vertex), bottom), top)
            stored = value
        # A channel that was never active keeps its codes.
        change = tl.where(pivot > 0.0, (value - before) * step, 0.0)
        stored = tl.where(pivot > 0.0, stored, code)
        slope += change[:, None] * gram[None, :]
        chosen = tl.where(here, stored[:, None], chosen)
        moved = tl.where(here, change[:, None], moved)
        if FITS:
            number = tl.where(pivot > 0.0, value, before)
            if ZERO:
                number -= tl.load(zero_ptr + at_scale, present, 0.0)
            plain = tl.where(here, number[:, None], plain)
            weighed += number[:, None] * gram[None, :]
            if (j + 1) % size == 0:
                # The error is a parabola in the scale too: take its vertex, as far as it can be
                # stored.
                curve = tl.sum(plain * weighed, 1)
                best = step - tl.div_rn(tl.sum(plain * slope, 1), tl.maximum(curve, 1e-30))
                best = tl.where(curve > 0.0, best, step)
                held = best.to(scale_ptr.dtype.element_ty)
                kept = tl.load(scale_ptr + at_scale, present, 1.0)
                fits = held.to(tl.float32) * kept.to(tl.float32) > 0.0
                fits = fits & (tl.abs(held.to(tl.float32)) < float("inf"))
                held = tl.where(fits, held, kept)
                further = held.to(tl.float32) - step
                moved += plain * further[:, None]
                slope += weighed * further[:, None]
                tl.store(scale_ptr + at_scale, held, present)
                tl.store(step_ptr + at_scale, held.to(tl.float32), present)
                plain = tl.zeros_like(slope)
                weighed = tl.zeros_like(slope)
    tl.store(chosen_ptr + at_chosen, chosen.to(tl.int8), inside)
    tl.store(moved_ptr + rows[:, None] * moved_stride + columns[None, :], moved, inside)


def descend_block(
    slope: torch.Tensor,
    chosen: torch.Tensor,
    gram: torch.Tensor,
    steps: torch.Tensor,
    tile: torch.Tensor,
    bottom: float,
    top: float,
    is_fp4: bool = False,
    scales: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    size: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Move each code of one block in turn to its best value; returns how far the weights moved.

    `scales` are the stored scales, which `steps` holds in float32, and zero points: when given,
    each scale is fitted to its codes and updated in both. Each covers `size` columns, all of them
    in the block.
    """
    n_rows, n_columns = slope.shape
    moved = torch.empty(n_rows, n_columns, device=slope.device) if out is None else out
    stored, zero = scales or (steps, None)
    _descend[(triton.cdiv(n_rows, ROWS),)](
        slope, chosen, moved, gram, steps, stored, steps if zero is None else zero, tile,
        n_rows, n_columns, size or n_columns,
        slope.stride(0), chosen.stride(0), moved.stride(0), gram.stride(0), steps.stride(0),
        bottom, top,
        IS_FP4=is_fp4, FITS=scales is not None, ZERO=zero is not None,
        ROWS=ROWS, COLUMNS=triton.next_power_of_2(n_columns), num_warps=WARPS,
    )  # fmt: skip
    return moved
