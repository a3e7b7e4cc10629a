"""vLLM's own format: how a quantised layer's tensors are packed, and what config says.

Which tensors these are stands in `tensors.py` beside this file.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.export.tensors import kv_specs as kv_specs
from quantkit.export.tensors import layout as layout
from quantkit.export.tensors import specs as specs
from quantkit.formats import COMPRESSED_TENSORS
from quantkit.grid import QuantizedWeight
from quantkit.recipe import Recipe, WeightScheme


def tensors(
    module: str,
    weight: QuantizedWeight,
    recipe: Recipe,
    input_scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """One layer's quantised weight in the form of `specs`."""
    scheme = recipe.weights
    result = {f"{module}.weight_scale": weight.scale}
    if input_scale is not None:
        result[f"{module}.input_scale"] = input_scale
    if layout(recipe) != "pack-quantized":
        result[f"{module}.weight"] = weight.values
        return result
    result[f"{module}.weight_packed"] = pack(weight.values, scheme.num_bits)
    result[f"{module}.weight_shape"] = torch.tensor(weight.values.shape)
    if weight.zero_point is not None:
        packed = pack(weight.zero_point.t(), scheme.num_bits).t().contiguous()
        result[f"{module}.weight_zero_point"] = packed
    return result


def read(module: str, stored: Mapping[str, torch.Tensor], recipe: Recipe) -> QuantizedWeight:
    """The inverse of `tensors`."""
    scheme = recipe.weights
    scale = stored[f"{module}.weight_scale"]
    if layout(recipe) != "pack-quantized":
        return QuantizedWeight(stored[f"{module}.weight"], scale, None)
    rows, columns = (int(n) for n in stored[f"{module}.weight_shape"])
    values = unpack(stored[f"{module}.weight_packed"], scheme.num_bits, columns)
    zero_point = None
    if not scheme.symmetric:
        packed = stored[f"{module}.weight_zero_point"]
        zero_point = unpack(packed.t(), scheme.num_bits, rows).t().contiguous()
    return QuantizedWeight(values, scale, zero_point)


def pack(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Signed integers as unsigned fields of int32 words, the first column in the lowest bits."""
    per_word = 32 // num_bits
    offset = 1 << (num_bits - 1)
    fields = (values.to(torch.int16) + offset).to(torch.uint8)
    if missing := -fields.shape[1] % per_word:
        fields = torch.nn.functional.pad(fields, (0, missing))
    if num_bits == 4:
        # Two fields a byte; the bytes of a little-endian word are already in order.
        fields = fields[:, 0::2] | (fields[:, 1::2] << 4)
    # A clone, since `contiguous` leaves the odd strides of a single row as they are.
    return fields.clone(memory_format=torch.contiguous_format).view(torch.int32)


def unpack(packed: torch.Tensor, num_bits: int, columns: int) -> torch.Tensor:
    """The inverse of `pack`."""
    fields = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if num_bits == 4:
        fields = torch.stack((fields & 15, fields >> 4), dim=-1).flatten(-2)
    offset = 1 << (num_bits - 1)
    return (fields[:, :columns].to(torch.int16) - offset).to(torch.int8)


def quantization_config(recipe: Recipe, ignore: list[str]) -> dict[str, Any]:
    """What `config.json` tells a serving engine. `ignore` lists every Linear left alone."""
    activations = recipe.input_activations
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": layout(recipe),
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": recipe.kv_cache and recipe.kv_cache.model_dump(),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _weight_arguments(recipe.weights),
                "input_activations": activations and activations.model_dump(),
                "output_activations": None,
                "format": layout(recipe),
            }
        },
        "ignore": ignore,
    }


def _weight_arguments(scheme: WeightScheme) -> dict[str, Any]:
    arguments = {**scheme.model_dump(), "dynamic": False}
    arguments["block_structure"] = scheme.block_structure and list(scheme.block_structure)
    return arguments
