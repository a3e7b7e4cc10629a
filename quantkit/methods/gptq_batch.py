"""GPTQ on many weights of one shape at once: the experts of a layer, each with its own inputs.

The arithmetic of `gptq` with one more dimension. A hundred experts one after the other leave a GPU
idle between small kernels and synchronise at every factorisation; as a batch they fill it, with a
single synchronisation.
"""

from collections.abc import Sequence

import torch

from quantkit import grid, numbers
from quantkit.methods.columns import BLOCK, DAMPING, Factor, kernel, update_block
from quantkit.schemes import WeightScheme

PANEL = 256
"""Columns that are factored or inverted at a time; between panels there are matrix products."""


def factor(grams: Sequence[torch.Tensor]) -> tuple[Factor, list[bool]]:
    """Order, damp and factor every matrix; also returns which ones factored at the first
    damping.
    """
    diagonal = torch.stack([gram.diagonal() for gram in grams])
    order = torch.argsort(diagonal, dim=1, descending=True, stable=True)
    mean = diagonal.mean(1, keepdim=True)
    n = diagonal.shape[1]
    matrices = torch.empty(len(grams), n, n, device=diagonal.device)
    for matrix, gram, backwards in zip(matrices, grams, order.flip(1), strict=True):
        torch.index_select(gram.index_select(0, backwards), 1, backwards, out=matrix)
    matrices.diagonal(dim1=1, dim2=2).add_(DAMPING[0] * mean)
    factored = cholesky_(matrices)
    invert_lower_(matrices)
    upper = matrices.flip(1, 2)  # rows contiguous again
    ends = upper.diagonal(dim1=1, dim2=2)
    factored &= (mean[:, 0] > 0) & ends.isfinite().all(1)
    return Factor(upper, order, DAMPING[0]), factored.tolist()


def cholesky_(matrices: torch.Tensor) -> torch.Tensor:
    """Replace matrices [batch, n, n] by their lower factors; returns which of them have one.

    In panels, since libraries factor many small matrices well, and large ones one by one.
    """
    n = matrices.shape[-1]
    fine = torch.ones(len(matrices), dtype=torch.bool, device=matrices.device)
    for start in range(0, n, PANEL):
        stop = min(start + PANEL, n)
        here = matrices[:, start:stop, start:stop]
        pivot, failed = torch.linalg.cholesky_ex(here)
        here.copy_(pivot)
        fine &= failed == 0
        if stop < n:
            below = matrices[:, stop:, start:stop]
            below.copy_(below @ _inverse(pivot).mT)
            matrices[:, stop:, stop:].baddbmm_(below, below.mT, alpha=-1)
    matrices.tril_()
    return fine


def invert_lower_(matrices: torch.Tensor) -> None:
    """Replace lower triangular matrices [batch, n, n] by their inverses, half by half."""
    n = matrices.shape[-1]
    if n <= PANEL:
        matrices.copy_(_inverse(matrices))
        return
    half = -(-n // 2 // PANEL) * PANEL
    first, last = matrices[:, :half, :half], matrices[:, half:, half:]
    between = matrices[:, half:, :half]
    invert_lower_(first)
    invert_lower_(last)
    between.copy_((last @ (between @ first)).neg_())


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    unit = torch.eye(lower.shape[-1], device=lower.device, dtype=lower.dtype)
    return torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False)


def solve(
    weights: Sequence[torch.Tensor],
    factors: Factor,
    scales: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    global_scales: Sequence[torch.Tensor | None],
    scheme: WeightScheme,
) -> list[grid.QuantizedWeight]:
    """Round float32 weights [rows, columns] with fixed scales and zero points, as one batch."""
    number = numbers.of(scheme)
    steps = torch.stack(
        [
            number.steps(scale, whole)
            for (scale, _), whole in zip(scales, global_scales, strict=True)
        ]
    )
    zeros = None
    if scales[0][1] is not None:
        zeros = torch.stack([zero.float() for _, zero in scales if zero is not None])
    rows, columns = weights[0].shape
    places = factors.order[:, None].expand(-1, rows, -1)
    tile = factors.order // (columns // steps.shape[2])
    remaining = torch.stack(
        [w.index_select(1, order) for w, order in zip(weights, factors.order, strict=True)]
    )
    chosen = torch.empty_like(remaining, dtype=torch.int8)
    bottom, top = number.limits
    update = kernel() if remaining.device.type == "cuda" else update_block
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = update(
            remaining[:, :, start:stop],
            chosen[:, :, start:stop],
            factors.upper[:, start:stop, start:stop],
            steps,
            zeros,
            tile[:, start:stop],
            bottom,
            top,
            scheme.kind == "fp4",
        )
        rest = factors.upper[:, start:stop, stop:]
        remaining[:, :, stop:].baddbmm_(errors, rest, alpha=-1)
    values = torch.empty_like(chosen).scatter_(2, places, chosen)
    if scheme.kind == "fp4":
        values = values.view(torch.uint8)
    return [
        grid.QuantizedWeight(found, scale, zero, whole)
        for found, (scale, zero), whole in zip(values, scales, global_scales, strict=True)
    ]
