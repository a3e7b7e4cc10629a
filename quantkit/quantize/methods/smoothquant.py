"""SmoothQuant: move the outliers of activations into the weights.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", https://arxiv.org/abs/2211.10438

s_i = max|x_i|^a / max|w_i|^(1-a): with 8-bit activations a few large channels would otherwise take
the whole grid for themselves.
"""

import torch


def scales(max_abs: torch.Tensor, weight_max: torch.Tensor, strength: float) -> torch.Tensor:
    """The scale of every input channel; 1 where a channel was never active."""
    inputs = max_abs.clamp(min=1e-5 * max_abs.max().clamp(min=1e-30))
    weights = weight_max.clamp(min=1e-5 * weight_max.max().clamp(min=1e-30))
    scale = inputs**strength / weights ** (1 - strength)
    return torch.where(max_abs > 0, scale / (scale.max() * scale.min()).sqrt(), 1.0)
