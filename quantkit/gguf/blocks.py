"""Pack weights into GGUF blocks: rows of numbers in, rows of bytes out."""

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import kquants, mxfp4, nonlinear, plain
from quantkit.gguf.values import FLOATS

KINDS = plain.KINDS | nonlinear.KINDS | kquants.KINDS | mxfp4.KINDS
AT_ONCE = {"cuda": 1 << 25, "cpu": 1 << 18}
"""Weights searched per call: enough to fill a GPU, or few enough to stay in a CPU's caches."""


@torch.no_grad()
def quantize(
    weight: torch.Tensor, kind: GGMLQuantizationType, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantise a weight [rows, columns] to bytes [rows, bytes per row].

    `importance` [columns], the mean square of each input, weights the errors where it is given.
    """
    if kind in FLOATS:
        return weight.to(FLOATS[kind]).contiguous().view(torch.uint8)
    if importance is not None:
        importance = importance.to(weight.device, torch.float32)
    step = max(1, AT_ONCE[weight.device.type] // weight.shape[1])
    parts = [KINDS[kind](rows.float(), importance) for rows in torch.split(weight, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
