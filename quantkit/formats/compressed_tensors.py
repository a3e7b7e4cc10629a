"""compressed-tensors, vLLM's own format: it holds everything that a recipe can say."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit import numbers
from quantkit.formats import words
from quantkit.formats.contract import Schemes
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme
from quantkit.tensorspec import TensorSpec

if TYPE_CHECKING:
    import torch

    from quantkit.grid import QuantizedWeight

NAME = "compressed-tensors"
SCALE_TYPE: str | None = None


def objection(
    weights: WeightScheme,
    activations: ActivationScheme | None,
    kv_cache: KVCacheScheme | None,
) -> str | None:
    """It holds everything that a recipe can say."""
    return None


def misfit(rows: int, columns: int, weights: WeightScheme) -> str | None:
    """Any shape goes that the scheme divides."""
    return None


def layout(recipe: Schemes) -> str:
    """The library's name for this way of storing weights."""
    if recipe.weights.type == "float":
        return "float-quantized"
    return "pack-quantized" if recipe.input_activations is None else "int-quantized"


def specs(module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
    """The tensors that stand for one layer's weight.

    Weight-only integers are packed into int32 along the columns (`weight_packed`, with the shape
    beside it); 8-bit weights for 8-bit activations stay one value a byte (`weight`). Scales are
    [rows, tiles of a row], or [1] for one scale a tensor.
    """
    rows, columns = weight.shape
    scheme = recipe.weights
    tiles = scheme.n_scales(rows, columns)
    shape = (1,) if scheme.strategy == "tensor" else tiles
    scale = TensorSpec(f"{module}.weight_scale", weight.dtype, shape)
    if layout(recipe) != "pack-quantized":
        stored = numbers.of(scheme).file_type
        result = [TensorSpec(f"{module}.weight", stored, (rows, columns)), scale]
        if recipe.has_static_inputs:
            result.append(TensorSpec(f"{module}.input_scale", weight.dtype, (1,)))
        return result
    per_word = 32 // scheme.num_bits
    result = [
        TensorSpec(f"{module}.weight_packed", "I32", (rows, -(-columns // per_word))),
        scale,
        TensorSpec(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric:
        packed = (-(-rows // per_word), tiles[1])
        result.append(TensorSpec(f"{module}.weight_zero_point", "I32", packed))
    return result


def pack(
    module: str,
    weight: "QuantizedWeight",
    recipe: Schemes,
    input_scale: "torch.Tensor | None" = None,
) -> dict[str, "torch.Tensor"]:
    """One layer's quantised weight in the form of `specs`."""
    import torch

    scheme = recipe.weights
    result = {f"{module}.weight_scale": weight.scale}
    if input_scale is not None:
        result[f"{module}.input_scale"] = input_scale
    if layout(recipe) != "pack-quantized":
        result[f"{module}.weight"] = weight.values
        return result
    result[f"{module}.weight_packed"] = words.pack(weight.values, scheme.num_bits)
    result[f"{module}.weight_shape"] = torch.tensor(weight.values.shape)
    if weight.zero_point is not None:
        packed = words.pack(weight.zero_point.t(), scheme.num_bits).t().contiguous()
        result[f"{module}.weight_zero_point"] = packed
    return result


def unpack(module: str, stored: Mapping[str, "torch.Tensor"], recipe: Schemes) -> "QuantizedWeight":
    """The inverse of `pack`."""
    from quantkit.grid import QuantizedWeight

    scheme = recipe.weights
    scale = stored[f"{module}.weight_scale"]
    if layout(recipe) != "pack-quantized":
        return QuantizedWeight(stored[f"{module}.weight"], scale, None)
    rows, columns = (int(n) for n in stored[f"{module}.weight_shape"])
    values = words.unpack(stored[f"{module}.weight_packed"], scheme.num_bits, columns)
    zero_point = None
    if not scheme.symmetric:
        packed = stored[f"{module}.weight_zero_point"]
        zero_point = words.unpack(packed.t(), scheme.num_bits, rows).t().contiguous()
    return QuantizedWeight(values, scale, zero_point)


def config(recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
    """What `config.json` tells a serving engine. `ignore` lists every Linear left alone."""
    activations = recipe.input_activations
    return {
        "quant_method": NAME,
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
