"""AutoAWQ's format in its GEMM version (https://github.com/casper-hansen/AutoAWQ).

    qweight  int32   [columns, rows / 8]   unsigned values, packed across the rows
    qzeros   int32   [groups, rows / 8]    zero points, packed alike
    scales   float16 [groups, rows]

A word holds eight rows, the even ones first: rows 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
A layer without zero points has the middle of the range, 8, for all of them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import CheckpointError
from quantkit.export.compressed_tensors import pack, unpack
from quantkit.formats import AWQ
from quantkit.grid import QuantizedWeight
from quantkit.recipe import Recipe

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = tuple(ORDER.index(place) for place in range(len(ORDER)))
SCALE = torch.float16


def tensors(module: str, weight: QuantizedWeight, recipe: Recipe) -> dict[str, torch.Tensor]:
    """One layer's quantised weight in the form of `specs`."""
    zeros = weight.zero_point
    if zeros is None:
        zeros = torch.zeros(weight.scale.shape, dtype=torch.int8, device=weight.scale.device)
    return {
        f"{module}.qweight": pack(_arranged(weight.values.t(), ORDER), BITS),
        f"{module}.qzeros": pack(_arranged(zeros.t(), ORDER), BITS),
        f"{module}.scales": weight.scale.t().to(SCALE).contiguous(),
    }


def read(module: str, stored: Mapping[str, torch.Tensor], recipe: Recipe) -> QuantizedWeight:
    """The inverse of `tensors`."""
    scales = stored[f"{module}.scales"]
    rows = scales.shape[1]
    values, zeros = (
        _arranged(unpack(stored[f"{module}.{part}"], BITS, rows), INVERSE).t().contiguous()
        for part in ("qweight", "qzeros")
    )
    zero_point: torch.Tensor | None = zeros
    if recipe.weights.symmetric:
        if zeros.any():
            raise CheckpointError(f"{module}.qzeros is not that of a symmetric layer")
        zero_point = None
    return QuantizedWeight(values, scales.t().contiguous(), zero_point)


def quantization_config(recipe: Recipe, ignore: list[str]) -> dict[str, Any]:
    """What `config.json` says. `ignore` lists every Linear left alone."""
    return {
        "quant_method": AWQ,
        "bits": BITS,
        "group_size": recipe.weights.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ignore,
    }


def _arranged(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The same with every eight columns in another order."""
    eights = values.reshape(values.shape[0], -1, len(order))
    return eights[:, :, list(order)].flatten(1)
