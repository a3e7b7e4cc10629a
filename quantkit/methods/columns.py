"""What GPTQ's rounding of one weight and of many share: the factor, and a block of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.numbers.mx import MXFP4

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

BLOCK = 128
FP4_CODES = MXFP4()
DAMPING = (0.1, 0.3, 1.0)
"""Of the mean of G's diagonal; the next where a matrix cannot be factored. The 0.01 of GPTQ's paper
serves the few largest directions of G, which other text has in other sizes."""


@dataclass(frozen=True)
class Factor:
    """The inverse's Cholesky factor in the order of importance, shared by all rows."""

    upper: torch.Tensor
    order: torch.Tensor
    damping: float


def kernel() -> Callable[..., torch.Tensor]:
    """What rounds a block of columns on a GPU, of one weight or of several."""
    from quantkit.methods.kernels import gptq_block

    return gptq_block.update_block


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

    `tile` says which column of `scale` belongs to each column of the block. Several weights have
    one more dimension in all of these, and go one after the other.
    """
    import torch

    if weight.ndim == 3:
        zeros = [None] * len(weight) if zero is None else list(zero)
        each = zip(weight, chosen, upper, scale, zeros, tile, strict=True)
        return torch.stack(
            [update_block(w, c, u, s, z, t, bottom, top, is_fp4) for w, c, u, s, z, t in each]
        )
    errors = weight.new_empty(weight.shape)
    for j, place in enumerate(tile.tolist()):
        column, step = weight[:, j], scale[:, place]
        scaled = column / step
        if zero is not None:
            scaled += zero[:, place]
        if is_fp4:
            chosen[:, j] = codes = FP4_CODES.round(scaled)
            value = FP4_CODES.widen(codes)
        else:
            chosen[:, j] = value = scaled.round_().clamp_(bottom, top)
        back = value - zero[:, place] if zero is not None else value
        error = (column - back * step) / upper[j, j]
        weight[:, j:].addr_(error, upper[j, j:], alpha=-1)
        errors[:, j] = error
    return errors
