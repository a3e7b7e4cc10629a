"""A recipe's result for one block: the quantised layers, and their errors."""

from dataclasses import dataclass, field

import torch

from quantkit import grid


@dataclass
class LinearResult:
    """One quantised layer, and its errors."""

    quantized: grid.QuantizedWeight
    in_scale: torch.Tensor | None
    """The stored weight is that of the source times this, per column ..."""
    out_scale: torch.Tensor | None
    """... and over this, per row."""
    input_scale: torch.Tensor | None
    """Input scale of static activations."""
    relative_error: torch.Tensor
    """Norm of the weight's change over the norm of the weight, with folded scales undone."""
    output_error: torch.Tensor
    """Squared error of the layer's output on calibration data, relative to that output's square."""
    damping: float | None = None
    fallback: bool = False
    held_out: dict[str, torch.Tensor] | None = None
    """Output error on held-out tokens by rounding method; the smallest was taken."""


@dataclass
class BlockResult:
    """A recipe's result for one block."""

    linears: dict[str, LinearResult] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that scales were folded into, in their stored dtype."""
    folded: dict[str, torch.Tensor] = field(default_factory=dict)
    """What each of them was divided by."""
    kv_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Scales of the KV cache: `<attention>.k_scale` and `.v_scale`."""
