"""vLLM's native FP8: weights as they are, scales in float32.

With per-tensor scales the names are those of AutoFP8 (`weight_scale`, and `input_scale` if
activations have fixed scales), scalars without a shape. With blocks of 128 x 128 they are those of
DeepSeek-V3 (`weight_scale_inv`, which multiplies like any scale). vLLM gives fused layers one
scale, the largest, and rounds the others a second time: ours share theirs from the start.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit import numbers
from quantkit.formats import packing
from quantkit.formats.contract import Schemes, any_shape
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme
from quantkit.tensorspec import TensorSpec

if TYPE_CHECKING:
    import torch

    from quantkit.grid import QuantizedWeight

NAME = "fp8"
SCALE_TYPE: str | None = None
misfit = any_shape


def objection(
    weights: WeightScheme,
    activations: ActivationScheme | None,
    kv_cache: KVCacheScheme | None,
) -> str | None:
    """None if vLLM reads it."""
    if weights.type != "float":
        return "fp8 is for FP8 weights; for integers use gptq, awq or compressed-tensors"
    if numbers.of(weights).tag != "fp8":
        name = numbers.of(weights).words.partition(" ")[0]
        return f"fp8 holds FP8 (E4M3) alone; {name} goes into compressed-tensors"
    if weights.strategy == "channel":
        return (
            "FP8 with a scale per row exists only in compressed-tensors; for fp8 use the recipe "
            "fp8-tensor, fp8-static or fp8-block"
        )
    if activations is None:
        return "fp8 always rounds activations too; weights alone need compressed-tensors"
    return packing.per_head(NAME, kv_cache)


def specs(module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
    """The tensors of one layer's weight."""
    rows, columns = weight.shape
    values = TensorSpec(f"{module}.weight", "F8_E4M3", (rows, columns))
    if recipe.weights.strategy == "block":
        # DeepSeek's name for it; it multiplies like any other scale.
        shape = recipe.weights.n_scales(rows, columns)
        return [values, TensorSpec(f"{module}.weight_scale_inv", "F32", shape)]
    result = [values, TensorSpec(f"{module}.weight_scale", "F32", ())]
    if recipe.has_static_inputs:
        result.append(TensorSpec(f"{module}.input_scale", "F32", ()))
    return result


def pack(
    module: str,
    weight: "QuantizedWeight",
    recipe: Schemes,
    input_scale: "torch.Tensor | None" = None,
) -> dict[str, "torch.Tensor"]:
    """One layer's quantised weight in the form of `specs`."""
    result = {f"{module}.weight": weight.values}
    scale = weight.scale.float()
    if recipe.weights.strategy == "block":
        return result | {f"{module}.weight_scale_inv": scale}
    result[f"{module}.weight_scale"] = scale.reshape(())
    if input_scale is not None:
        result[f"{module}.input_scale"] = input_scale.float().reshape(())
    return result


def unpack(module: str, stored: Mapping[str, "torch.Tensor"], recipe: Schemes) -> "QuantizedWeight":
    """The inverse of `pack`."""
    from quantkit.grid import QuantizedWeight

    values = stored[f"{module}.weight"]
    if recipe.weights.strategy == "block":
        return QuantizedWeight(values, stored[f"{module}.weight_scale_inv"], None)
    return QuantizedWeight(values, stored[f"{module}.weight_scale"].reshape(1), None)


def input_scale(module: str, stored: Mapping[str, "torch.Tensor"]) -> "torch.Tensor | None":
    """The one scale of a layer's inputs."""
    found = stored.get(f"{module}.input_scale")
    return None if found is None else found.reshape(1)


def config(recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
    """The section of `config.json`. `ignore` lists every unquantised Linear."""
    blocks = recipe.weights.block_structure
    assert recipe.input_activations is not None
    return {
        "quant_method": NAME,
        "fmt": "e4m3",
        "activation_scheme": "dynamic" if recipe.input_activations.dynamic else "static",
        "weight_block_size": blocks and list(blocks),
        # vLLM and AutoFP8 look for one name, transformers and DeepSeek for the other.
        "ignored_layers": ignore,
        "modules_to_not_convert": ignore,
    }
