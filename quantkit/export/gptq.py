"""AutoGPTQ's format (https://github.com/AutoGPTQ/AutoGPTQ), as vLLM and GPTQModel read it.

    qweight  int32 [columns / per word, rows]   unsigned values, packed down the columns
    qzeros   int32 [groups, rows / per word]    zero points less one, packed across the rows
    scales         [groups, rows]               in the model's own type
    g_idx    int32 [columns]                    the group of each column: here simply in order

Without zero points the middle of the range stands for zero: 8 of 16, or 128 of 256. That one is
subtracted before zeros are stored is how the format began; readers add it again ("v1").
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import CheckpointError
from quantkit.export.compressed_tensors import pack, unpack
from quantkit.formats import GPTQ
from quantkit.grid import QuantizedWeight
from quantkit.recipe import Recipe


def tensors(module: str, weight: QuantizedWeight, recipe: Recipe) -> dict[str, torch.Tensor]:
    """One layer's quantised weight in the form of `specs`."""
    bits = recipe.weights.num_bits
    rows, columns = weight.values.shape
    n_groups = weight.scale.shape[1]
    device = weight.values.device
    zeros = torch.full((n_groups, rows), -1, dtype=torch.int8, device=device)
    return {
        f"{module}.qweight": pack(weight.values, bits).t().contiguous(),
        f"{module}.qzeros": pack(zeros, bits),
        f"{module}.scales": weight.scale.t().contiguous(),
        f"{module}.g_idx": _groups(columns, n_groups).to(device),
    }


def read(module: str, stored: Mapping[str, torch.Tensor], recipe: Recipe) -> QuantizedWeight:
    """The inverse of `tensors`; zero points or an order of columns of their own are refused."""
    bits = recipe.weights.num_bits
    scales = stored[f"{module}.scales"]
    n_groups, rows = scales.shape
    packed = stored[f"{module}.qweight"]
    columns = packed.shape[0] * (32 // bits)
    order = stored[f"{module}.g_idx"]
    if not torch.equal(order, _groups(columns, n_groups).to(order.device)):
        raise CheckpointError(f"{module}.g_idx does not list groups in order: it has an act-order")
    if not (unpack(stored[f"{module}.qzeros"], bits, rows) == -1).all():
        raise CheckpointError(f"{module}.qzeros is not that of a symmetric layer")
    return QuantizedWeight(unpack(packed.t(), bits, columns), scales.t().contiguous(), None)


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    """What `config.json` says. Layers left alone are told by their tensors, which vLLM looks at."""
    return {
        "quant_method": GPTQ,
        "bits": recipe.weights.num_bits,
        "group_size": recipe.weights.group_size if recipe.weights.strategy == "group" else -1,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": GPTQ,
    }


def _groups(columns: int, n_groups: int) -> torch.Tensor:
    return torch.arange(n_groups, dtype=torch.int32).repeat_interleave(columns // n_groups)
