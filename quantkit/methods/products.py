"""Matrix products of float32 matrices, on the tensor cores where there are some.

An H200 multiplies float32 at 50 TFLOP/s and bf16 at 700. A float32 number is nearly the sum of two
bf16 numbers, so three bf16 products with float32 sums give 16 bits of precision at five times the
speed; one product gives 8 bits, which is enough to choose by.
"""

from dataclasses import dataclass

import torch

ROWS = 2048
"""Rows that are worked on at a time, which bounds the memory of what lies between."""


@dataclass(frozen=True)
class Halves:
    """A float32 matrix as the sum of two bf16 ones; off the GPU simply the matrix itself."""

    high: torch.Tensor
    low: torch.Tensor | None

    @classmethod
    def of(cls, matrix: torch.Tensor) -> "Halves":
        if matrix.device.type != "cuda":
            return cls(matrix, None)
        high = matrix.to(torch.bfloat16)
        low = torch.empty_like(high)
        for start in range(0, matrix.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            low[rows] = matrix[rows] - high[rows]
        return cls(high, low)


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.mm(left, right, out_dtype=torch.float32)


def coarse(left: torch.Tensor, right: Halves) -> torch.Tensor:
    """The product, on a GPU good to about a hundredth."""
    if right.low is None:
        return left.to(right.high.dtype) @ right.high
    return _mm(left.to(right.high.dtype), right.high)


def precise(left: torch.Tensor, right: Halves) -> torch.Tensor:
    """The product, good to about 1e-5."""
    if right.low is None:
        return left @ right.high
    parts = Halves.of(left)
    assert parts.low is not None
    small = _mm(parts.high, right.low).add_(_mm(parts.low, right.high))
    return small.add_(_mm(parts.high, right.high))


def row_energies(change: torch.Tensor, gram: Halves, exactly: bool = True) -> torch.Tensor:
    """d G d^T for every row d of a weight's change: the squared error of that output channel."""
    product = precise if exactly else coarse
    parts = [(product(rows, gram) * rows).sum(1) for rows in torch.split(change, ROWS)]
    return torch.cat(parts)


def tile_energies(change: torch.Tensor, grams: torch.Tensor) -> torch.Tensor:
    """The same by tiles: `change` is [tiles, rows, columns], `grams` [tiles, columns, columns]."""
    if change.device.type == "cuda":
        low = torch.bfloat16
        product = torch.bmm(change.to(low), grams.to(low), out_dtype=torch.float32)
    else:
        product = change @ grams
    return (product * change).sum(-1)


def invert_lower_(matrix: torch.Tensor, base: int = 1024) -> torch.Tensor:
    """Replace a lower triangular matrix by its inverse.

    Halves are inverted on their own and joined by two products: no triangular solver reaches the
    speed of a product.
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
