"""SmoothQuant: move the outliers of activations into the weights.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", https://arxiv.org/abs/2211.10438

s_i = max|x_i|^a / max|w_i|^(1-a): with 8-bit activations a few large channels would otherwise take
the whole grid for themselves. Difference to the reference code: the strength a is not one number
for the model. Each group of linears takes the one, none at all included, with the least predicted
error of weights and activations together.
"""

import torch

from quantkit.methods.statistics import Statistics

STRENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def activation_error(
    statistics: Statistics, weight: torch.Tensor, scale: torch.Tensor, top: float
) -> torch.Tensor:
    """Squared error of a layer's output when its inputs, over `scale`, are rounded by token.

    Rounding in steps of d is off by d^2 / 12 on average; the step follows from the largest input.
    """
    step = (statistics.max_abs / scale).max() / top
    return statistics.n_tokens * step.square() / 12 * (weight * scale).square().sum()


def scales(max_abs: torch.Tensor, weight_max: torch.Tensor, strength: float) -> torch.Tensor:
    """The scale of every input channel; 1 where a channel was never active."""
    inputs = max_abs.clamp(min=1e-5 * max_abs.max().clamp(min=1e-30))
    weights = weight_max.clamp(min=1e-5 * weight_max.max().clamp(min=1e-30))
    scale = inputs**strength / weights ** (1 - strength)
    return torch.where(max_abs > 0, scale / (scale.max() * scale.min()).sqrt(), 1.0)
