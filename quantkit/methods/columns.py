"""Shared by GPTQ on one weight and on a batch: the factor, and the rounding of a block of
columns.
"""

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
"""Damping relative to the mean of G's diagonal; the next is tried where a matrix cannot be
factored. The 0.01 of GPTQ's paper fits the few largest directions of G, whose size varies from text
to text.
"""


@dataclass(frozen=True)
class Factor:
    """The inverse's Cholesky factor in the order of importance, shared by all rows."""

    upper: torch.Tensor
    order: torch.Tensor
    damping: float


def kernel() -> Callable[..., torch.Tensor]:
    """The GPU kernel that rounds a block of columns, of one weight or of several."""
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

    `tile` maps each column of the block to its column of `scale`. For several weights all of these
    have one more dimension, and the weights are rounded one after the other.
    """
    import torch

    if weight.ndim == 3:
        of_each = [None] * len(weight) if zero is None else list(zero)
        each = zip(weight, chosen, upper, scale, of_each, tile, strict=True)
        return torch.stack(
            [update_block(w, c, u, s, z, t, bottom, top, is_fp4) for w, c, u, s, z, t in each]
        )
    # By columns: a strided column costs twice the time of the arithmetic on it.
    columns, steps = weight.t().contiguous(), scale.t().contiguous()
    zeros = None if zero is None else zero.t().contiguous()
    codes, errors = torch.empty_like(columns), torch.empty_like(columns)
    if is_fp4:
        codes = codes.to(torch.uint8)
    pivots = upper.diagonal().tolist()
    for j, place in enumerate(tile.tolist()):
        column, step = columns[j], steps[place]
        scaled = column / step
        if zeros is not None:
            scaled += zeros[place]
        if is_fp4:
            codes[j] = rounded = FP4_CODES.round(scaled)
            value = FP4_CODES.widen(rounded)
        else:
            codes[j] = value = scaled.round_().clamp_(bottom, top)
        back = value if zeros is None else value - zeros[place]
        error = torch.sub(column, back * step, out=errors[j]).div_(pivots[j])
        columns[j + 1 :].addr_(upper[j, j + 1 :], error, alpha=-1)
    chosen.copy_(codes.t())
    return errors.t().contiguous()
