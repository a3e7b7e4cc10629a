"""vLLM's native FP8: weights as they are, scales in float32.

With one scale a tensor the names are those of AutoFP8 (`weight_scale`, and `input_scale` where
activations have fixed scales), scalars without a shape. With blocks of 128 x 128 they are those of
DeepSeek-V3 (`weight_scale_inv`, which multiplies like any scale). vLLM gives layers that it fuses
one scale, the largest, and rounds the others a second time: ours share theirs from the start.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.formats import FP8
from quantkit.grid import QuantizedWeight
from quantkit.recipe import Recipe


def tensors(
    module: str,
    weight: QuantizedWeight,
    recipe: Recipe,
    input_scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """One layer's quantised weight in the form of `specs`."""
    result = {f"{module}.weight": weight.values}
    scale = weight.scale.float()
    if recipe.weights.strategy == "block":
        return result | {f"{module}.weight_scale_inv": scale}
    result[f"{module}.weight_scale"] = scale.reshape(())
    if input_scale is not None:
        result[f"{module}.input_scale"] = input_scale.float().reshape(())
    return result


def read(module: str, stored: Mapping[str, torch.Tensor], recipe: Recipe) -> QuantizedWeight:
    """The inverse of `tensors`."""
    values = stored[f"{module}.weight"]
    if recipe.weights.strategy == "block":
        return QuantizedWeight(values, stored[f"{module}.weight_scale_inv"], None)
    return QuantizedWeight(values, stored[f"{module}.weight_scale"].reshape(1), None)


def quantization_config(recipe: Recipe, ignore: list[str]) -> dict[str, Any]:
    """What `config.json` says. `ignore` lists every Linear left alone."""
    blocks = recipe.weights.block_structure
    assert recipe.input_activations is not None
    return {
        "quant_method": FP8,
        "fmt": "e4m3",
        "activation_scheme": "dynamic" if recipe.input_activations.dynamic else "static",
        "weight_block_size": blocks and list(blocks),
        # vLLM and AutoFP8 look for the one name, transformers and DeepSeek for the other.
        "ignored_layers": ignore,
        "modules_to_not_convert": ignore,
    }
