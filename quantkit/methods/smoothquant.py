"""SmoothQuant: move the outliers of activations into the weights.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", https://arxiv.org/abs/2211.10438

s_i = max|x_i|^a / max|w_i|^(1-a): with 8-bit activations a few large channels would otherwise take
up the whole grid. Difference from the reference code: the strength a is not one number for the
model. Each group of linears takes the strength, zero included, with the least predicted error of
weights and activations together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.methods.awq import JUDGING_ROWS, judging_rows, rounding_errors
from quantkit.methods.contract import PROPAGATE, Cost, Linears, Method, Option
from quantkit.methods.gptq import ColumnByColumn
from quantkit.numbers.integers import Integer

if TYPE_CHECKING:
    import torch

    from quantkit.methods.statistics import Statistics

STRENGTHS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


class Balancing:
    """Scales that balance activations and weights, at the strength with the smallest error."""

    statistics = ("gram", "max_abs", "n_tokens")

    def cost(self, rows: int, columns: int) -> Cost:
        return Cost(2.0 * (1 + len(STRENGTHS)) * min(rows, JUDGING_ROWS) * columns**2)

    def scale(self, linears: Linears) -> torch.Tensor:
        import torch

        inputs = linears.foldable(linears.inputs.max_abs)
        weights = linears.foldable(linears.weight.abs().amax(0))
        if (fixed := linears.options.get("strength")) is not None:
            return scales(inputs, weights, float(fixed))
        tries = [torch.ones_like(inputs), *(scales(inputs, weights, s) for s in STRENGTHS)]
        judges = judging_rows(linears.weight)
        rounded = [
            activation_error(linears.inputs, judges, scale, Integer(8).activation_top)
            for scale in tries
        ]
        return tries[int((rounding_errors(linears, tries) + torch.stack(rounded)).argmin())]


SMOOTHQUANT_GPTQ = Method(
    "move activation outliers into the weights, then GPTQ",
    "SmoothQuant moves outliers of the activations into the weights, so that both round well; GPTQ "
    "then rounds the weights column by column.",
    ColumnByColumn(),
    Balancing(),
    propagates=True,
    options={
        "propagate": PROPAGATE,
        "strength": Option(
            "a number between 0 and 1", lambda value: isinstance(value, float) and 0 < value < 1
        ),
    },
    types=("int",),
    modifiers=("SmoothQuantModifier", "GPTQModifier"),
)


def activation_error(
    statistics: Statistics, weight: torch.Tensor, scale: torch.Tensor, top: float
) -> torch.Tensor:
    """Squared error of a layer's output when its inputs, over `scale`, are rounded per token.

    Rounding in steps of d has a mean squared error of d^2 / 12; the step follows from the largest
    input.
    """
    step = (statistics.max_abs / scale).max() / top
    return statistics.n_tokens * step.square() / 12 * (weight * scale).square().sum()


def scales(max_abs: torch.Tensor, weight_max: torch.Tensor, strength: float) -> torch.Tensor:
    """The scale of every input channel; 1 where a channel was never active."""
    import torch

    inputs = max_abs.clamp(min=1e-5 * max_abs.max().clamp(min=1e-30))
    weights = weight_max.clamp(min=1e-5 * weight_max.max().clamp(min=1e-30))
    scale = inputs**strength / weights ** (1 - strength)
    return torch.where(max_abs > 0, scale / (scale.max() * scale.min()).sqrt(), 1.0)
