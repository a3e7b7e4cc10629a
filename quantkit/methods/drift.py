"""Weights for inputs that have drifted: what would make up for it before any rounding.

Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration",
https://arxiv.org/abs/2504.02692

The blocks before are quantised, so a layer sees X where the source's own sees X + M; where inputs
are rounded at run time, that is part of M, too. The layer that comes nearest to W (X + M) on X is
W + W M X^T (X X^T)^-1, by least squares: that is what gets rounded, and nothing else changes. On
few tokens it fits their noise, so that a part of the step may be better: how much, tokens decide
that the step was not fitted to, in closed form.

Difference to the paper: its correction is computed column by column within GPTQ's sweep, always in
full, and from the cross-Gram matrix of all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantkit.methods import products

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.methods.columns import Factor
    from quantkit.methods.statistics import Statistics


def corrected(
    weight: torch.Tensor, inputs: Statistics, factor: Factor, heights: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights to round, and how much of the step each linear takes, from 0 to 1.

    `factor` is of the tokens that are not held out.
    """
    assert inputs.drift is not None
    assert inputs.held_drift is not None
    assert inputs.held is not None
    step = _step(weight, inputs.drift - inputs.held_drift, factor)
    wanted = products.precise(weight, products.Halves.of(inputs.held_drift))
    gain = _by_linear((wanted * step).sum(1), heights)
    size = _by_linear(products.row_energies(step, products.Halves.of(inputs.held)), heights)
    strengths = (gain / size.clamp(min=1e-30)).clamp(0, 1)
    rows = torch.repeat_interleave(strengths, torch.tensor(heights, device=weight.device))
    return step.mul_(rows[:, None]).add_(weight), strengths


def _step(weight: torch.Tensor, drift: torch.Tensor, factor: Factor) -> torch.Tensor:
    """W drift G^-1, where the factor U of G^-1 = U^T U has columns in an order of its own."""
    moved = products.precise(weight, products.Halves.of(drift[:, factor.order]))
    half = products.precise(moved, products.Halves.of(factor.upper.t().contiguous()))
    found = products.precise(half, products.Halves.of(factor.upper))
    step = torch.empty_like(found)
    step[:, factor.order] = found
    return step


def _by_linear(rows: torch.Tensor, heights: Sequence[int]) -> torch.Tensor:
    return torch.stack([part.sum() for part in torch.split(rows, list(heights))])
