"""AWQ: make important input channels larger before rounding, and what feeds them smaller.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
https://arxiv.org/abs/2306.00978

Scaling channel i of the input by 1/s_i and column i of the weight by s_i changes nothing but the
rounding. The scales come from a grid over exponents of the mean input magnitude, with and without
the weight's own magnitude. Difference to the reference code: with G the Gram matrix of the inputs
and D the change of the weight, tr(D G D^T) is exactly the squared error of the layer's output, so
that the search needs no forward pass.
"""

from collections.abc import Callable, Sequence

import torch

from quantkit.methods.products import Halves, row_energies

EXPONENTS = 20


def candidates(mean_abs: torch.Tensor, weight_abs: torch.Tensor) -> list[torch.Tensor]:
    """Scales to try; the first is no scaling at all."""
    inputs = mean_abs.clamp(min=1e-6 * mean_abs.max().clamp(min=1e-30))
    weights = weight_abs.clamp(min=1e-6 * weight_abs.max().clamp(min=1e-30))
    found = [torch.ones_like(inputs)]
    for step in range(1, EXPONENTS):
        exponent = step / EXPONENTS
        for other in (0.0, 1 - exponent):
            scale = inputs**exponent / weights**other
            found.append(scale / (scale.max() * scale.min()).sqrt())
    return found


def errors(
    tries: Sequence[torch.Tensor],
    gram: Halves,
    change_of: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The output error of every candidate; `change_of` gives what rounding does under a scale."""
    return torch.stack(
        [row_energies(change_of(scale), gram, exactly=False).sum() for scale in tries]
    )
