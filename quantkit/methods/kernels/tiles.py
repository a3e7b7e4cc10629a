"""Shared prologue of tile-wise kernels: the rows of a program's tile, and its weights."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(  # type: ignore[no-untyped-def]
    weight_ptr, n_rows, n_columns, ROWS: tl.constexpr, SIZE: tl.constexpr
):
    """Rows, which of them exist, the tile's number, its elements' offsets, and its weights.

    Programs are numbered by blocks of rows, then by tile. Offsets are 64-bit, since a weight may
    have more than 2^31 elements; rows that do not exist are zeros.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    present = rows < n_rows
    at = rows[:, None].to(tl.int64) * n_columns + tile * SIZE + tl.arange(0, SIZE)[None, :]
    return rows, present, tile, at, tl.load(weight_ptr + at, present[:, None], 0.0)
