"""Products of float32 matrices, on tensor cores where available.

An H200 multiplies float32 at 50 TFLOP/s and bf16 at 700. A float32 number is nearly the sum of two
bf16 numbers, so three bf16 products with float32 accumulation give 16 bits of precision at five
times the speed; one product gives 8 bits, which is enough to choose by.
"""

from dataclasses import dataclass
from functools import cache

import torch

ROWS = 2048
"""Rows per step, which bounds the memory of intermediate results."""


@dataclass(frozen=True)
class Halves:
    """A float32 matrix as the sum of two bf16 ones; on the CPU simply the matrix itself."""

    high: torch.Tensor
    low: torch.Tensor | None

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "Halves":
        if matrix.device.type != "cuda":
            return cls(matrix, None)
        if _kernels(matrix):
            from quantkit.methods.kernels import halves

            if matrix.stride(1) == 1:
                return cls(*halves.split(matrix))
            high, low = halves.split(matrix.mT)  # stays column by column, as torch leaves it
            return cls(high.mT, low.mT)
        high = matrix.to(torch.bfloat16)
        low = torch.empty_like(high)
        for start in range(0, matrix.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            low[rows] = matrix[rows] - high[rows]
        return cls(high, low)


def _kernels(matrix: torch.Tensor) -> bool:
    """Whether kernels split a matrix: its rows or its columns are contiguous."""
    return matrix.device.type == "cuda" and 1 in matrix.stride()


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right, out_dtype=torch.float32)


def coarse(left: torch.Tensor, right: Halves) -> torch.Tensor:
    """The product, accurate to about a hundredth on a GPU."""
    if right.low is None:
        return left.to(right.high.dtype) @ right.high
    return _mm(left.to(right.high.dtype), right.high)


def precise(left: torch.Tensor, right: Halves) -> torch.Tensor:
    """The product, accurate to about 1e-5."""
    if right.low is None:
        return left @ right.high
    parts = Halves.of(left)
    assert parts.low is not None
    found = _mm(parts.high, right.low)
    add_(found, parts.low, right.high)
    return add_(found, parts.high, right.high)


def add_(
    target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0
) -> torch.Tensor:
    """Add a product to a float32 matrix in place, without a temporary where torch supports it.

    The factors are both float32, or both bf16 on the tensor cores.
    """
    if left.dtype == torch.float32:
        return target.addmm_(left, right, alpha=alpha)
    if _adds_in_place():
        return torch.addmm(target, left, right, out_dtype=torch.float32, alpha=alpha, out=target)
    return target.add_(_mm(left, right), alpha=alpha)


def add_precise_(
    target: torch.Tensor, left: torch.Tensor, right: Halves | torch.Tensor, alpha: float = 1.0
) -> torch.Tensor:
    """Add the product, accurate to about 1e-5, to a float32 matrix.

    The three products are computed as one of concatenated matrices, so the target is read and
    written once: for few columns on the left.
    """
    if target.device.type != "cuda":
        return target.add_(left @ (right.high if isinstance(right, Halves) else right), alpha=alpha)
    return add_(target, _side_by_side(left), _stacked(right), alpha)


def _side_by_side(left: torch.Tensor) -> torch.Tensor:
    if _kernels(left):
        from quantkit.methods.kernels import halves

        return halves.side_by_side(left)
    parts = Halves.of(left)
    assert parts.low is not None
    return torch.cat((parts.high, parts.low, parts.high), 1)


def _stacked(right: Halves | torch.Tensor) -> torch.Tensor:
    if isinstance(right, torch.Tensor) and _kernels(right):
        from quantkit.methods.kernels import halves

        return halves.stacked(right)
    parts = right if isinstance(right, Halves) else Halves.of(right)
    assert parts.low is not None
    return torch.cat((parts.low, parts.high, parts.high))


@cache
def _adds_in_place() -> bool:
    """Whether torch can add a bf16 product to float32; releases before 2.10 refuse."""
    target = torch.zeros(16, 16, device="cuda")
    part = torch.zeros(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.addmm(target, part, part, out_dtype=torch.float32, out=target)
    except (RuntimeError, TypeError):
        return False
    return True


def row_energies(change: torch.Tensor, gram: Halves, exactly: bool = True) -> torch.Tensor:
    """d G d^T for every row d of a weight's change: the squared error of that output channel."""
    product = precise if exactly else coarse
    parts = [(product(rows, gram) * rows).sum(1) for rows in torch.split(change, ROWS)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def tile_energies(change: torch.Tensor, grams: torch.Tensor) -> torch.Tensor:
    """The same per tile: `change` is [tiles, rows, columns], `grams` [tiles, columns, columns]."""
    if change.device.type == "cuda":
        low = torch.bfloat16
        product = torch.bmm(change.to(low), grams.to(low), out_dtype=torch.float32)
    else:
        product = change @ grams
    return (product * change).sum(-1)


def invert_lower_(matrix: torch.Tensor, base: int = 1024) -> torch.Tensor:
    """Replace a lower triangular matrix by its inverse.

    Halves are inverted separately and joined by two products: no triangular solver is as fast as a
    matrix product.
    """
    size = matrix.shape[0]
    if size <= base:
        unit = torch.eye(size, device=matrix.device, dtype=matrix.dtype)
        matrix.copy_(torch.linalg.solve_triangular(matrix, unit, upper=False))
        return matrix
    half = size // 2 // 128 * 128
    first, last, between = matrix[:half, :half], matrix[half:, half:], matrix[half:, :half]
    invert_lower_(first, base)
    invert_lower_(last, base)
    right = precise(between, Halves.of(first))
    between.copy_(precise(last, Halves.of(right)).neg_())
    return matrix
