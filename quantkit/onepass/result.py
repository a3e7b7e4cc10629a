"""What a recipe makes of one block: the numbers of its layers, and how well they stand for it."""

from dataclasses import dataclass, field

import torch

from quantkit import grid


@dataclass
class LinearResult:
    """One layer's numbers, and how well they stand for its weight."""

    quantized: grid.QuantizedWeight
    in_scale: torch.Tensor | None
    """The stored weight is that of the source times this, column by column ..."""
    out_scale: torch.Tensor | None
    """... and over this, row by row."""
    input_scale: torch.Tensor | None
    """Of static activations."""
    relative_error: torch.Tensor
    """Norm of the weight's change over the norm of the weight, folded scales taken back."""
    output_error: torch.Tensor
    """Squared error of the layer's output on calibration data, over that output's square."""
    damping: float | None = None
    fallback: bool = False
    held_out: dict[str, torch.Tensor] | None = None
    """Output error on held-out tokens by way of rounding; the least was taken."""


@dataclass
class BlockResult:
    """What a recipe made of one block."""

    linears: dict[str, LinearResult] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that took up folded scales, in the type they are stored in."""
    folded: dict[str, torch.Tensor] = field(default_factory=dict)
    """By what each of them was divided."""
    kv_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the cache: `<attention>.k_scale` and `.v_scale`."""
