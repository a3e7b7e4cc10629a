"""A float32 matrix as two bf16 ones in one read; the torch twin is in `methods.products`.

Also laid out as the products that add three of them up in one take them.
"""

import torch
import triton
import triton.language as tl

ROWS = 32
COLUMNS = 128


@triton.jit  # type: ignore[untyped-decorator]
def _split(  # type: ignore[no-untyped-def]
    matrix_ptr, high_ptr, low_ptr, again_ptr, n_rows, n_columns, by_row, by_column, out_stride,
    AGAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (rows < n_rows) & (columns < n_columns)
    whole = tl.load(matrix_ptr + rows * by_row + columns * by_column, inside, 0.0)
    high = whole.to(tl.bfloat16)
    at = rows * out_stride + columns
    tl.store(high_ptr + at, high, inside)
    tl.store(low_ptr + at, (whole - high.to(tl.float32)).to(tl.bfloat16), inside)
    if AGAIN:
        tl.store(again_ptr + at, high, inside)


def _launch(
    matrix: torch.Tensor, high: torch.Tensor, low: torch.Tensor, again: torch.Tensor | None = None
) -> None:
    n_rows, n_columns = matrix.shape
    if matrix.numel():
        _split[(triton.cdiv(n_rows, ROWS), triton.cdiv(n_columns, COLUMNS))](
            matrix, high, low, high if again is None else again,
            n_rows, n_columns, *matrix.stride(), high.stride(0),
            AGAIN=again is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip


def _empty(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=like.device)


def split(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low half of a matrix, row by row."""
    high, low = _empty(matrix, *matrix.shape), _empty(matrix, *matrix.shape)
    _launch(matrix, high, low)
    return high, low


def side_by_side(matrix: torch.Tensor) -> torch.Tensor:
    """The high, the low and the high half again, in columns."""
    rows, columns = matrix.shape
    out = _empty(matrix, rows, 3 * columns)
    _launch(matrix, *torch.split(out, columns, 1))
    return out


def stacked(matrix: torch.Tensor) -> torch.Tensor:
    """The low, the high and the high half again, in rows."""
    rows, columns = matrix.shape
    out = _empty(matrix, 3 * rows, columns)
    low, high, again = torch.split(out, rows)
    _launch(matrix, high, low, again)
    return out
