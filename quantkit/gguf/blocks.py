"""Weights to GGUF blocks: rows of numbers in, rows of bytes out."""

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import kquants, nonlinear, plain
from quantkit.gguf.values import FLOATS

KINDS = plain.KINDS | nonlinear.KINDS | kquants.KINDS
AT_ONCE = {"cuda": 1 << 25, "cpu": 1 << 18}
"""Weights that are searched together: enough to fill a GPU, or few enough for a CPU's caches."""


@torch.no_grad()
def quantize(
    weight: torch.Tensor, kind: GGMLQuantizationType, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """A weight [rows, columns] as bytes [rows, bytes of a row].

    Errors count by `importance` [columns], the mean square of each input, where it is given.
    """
    if kind in FLOATS:
        return weight.to(FLOATS[kind]).contiguous().view(torch.uint8)
    if importance is not None:
        importance = importance.to(weight.device, torch.float32)
    step = max(1, AT_ONCE[weight.device.type] // weight.shape[1])
    parts = [KINDS[kind](rows.float(), importance) for rows in torch.split(weight, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
