"""A quantised layer as the tensors of its recipe's format, and back; one file beside this a format.

Which tensors these are stands in `tensors.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit import formats
from quantkit.export import awq, compressed_tensors, fp8, gptq
from quantkit.export.tensors import specs as specs
from quantkit.grid import QuantizedWeight
from quantkit.recipe import Recipe


def tensors(
    module: str,
    weight: QuantizedWeight,
    recipe: Recipe,
    input_scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """One layer's quantised weight in the form of `specs`."""
    if recipe.format == formats.GPTQ:
        return gptq.tensors(module, weight, recipe)
    if recipe.format == formats.AWQ:
        return awq.tensors(module, weight, recipe)
    if recipe.format == formats.FP8:
        return fp8.tensors(module, weight, recipe, input_scale)
    return compressed_tensors.tensors(module, weight, recipe, input_scale)


def read(module: str, stored: Mapping[str, torch.Tensor], recipe: Recipe) -> QuantizedWeight:
    """The inverse of `tensors`."""
    if recipe.format == formats.GPTQ:
        return gptq.read(module, stored, recipe)
    if recipe.format == formats.AWQ:
        return awq.read(module, stored, recipe)
    if recipe.format == formats.FP8:
        return fp8.read(module, stored, recipe)
    return compressed_tensors.read(module, stored, recipe)


def quantization_config(recipe: Recipe, ignore: list[str]) -> dict[str, Any]:
    """What `config.json` tells a serving engine. `ignore` lists every Linear left alone."""
    if recipe.format == formats.GPTQ:
        return gptq.quantization_config(recipe)
    if recipe.format == formats.AWQ:
        return awq.quantization_config(recipe, ignore)
    if recipe.format == formats.FP8:
        return fp8.quantization_config(recipe, ignore)
    return compressed_tensors.quantization_config(recipe, ignore)


def scale_dtype(recipe: Recipe) -> torch.dtype | None:
    """A type that scales are stored in and may not fit into; None where they always do."""
    return awq.SCALE if recipe.format == formats.AWQ else None
