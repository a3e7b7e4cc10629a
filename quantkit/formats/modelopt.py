"""NVIDIA ModelOpt's NVFP4 (https://github.com/NVIDIA/TensorRT-Model-Optimizer), for TensorRT-LLM.

    weight          uint8 [rows, columns / 2]   two codes per byte, the first in the low half
    weight_scale    E4M3  [rows, columns / 16]
    weight_scale_2  float32                     one over compressed-tensors' global scale
    input_scale     float32                     likewise; only where activations are NVFP4 too

vLLM turns compressed-tensors' global scales into these very numbers when it loads a checkpoint.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit import numbers
from quantkit.formats import compressed_tensors, packing
from quantkit.formats.contract import Schemes
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme
from quantkit.tensorspec import TensorSpec

if TYPE_CHECKING:
    import torch

    from quantkit.grid import QuantizedWeight

NAME = "modelopt"
SCALE_TYPE: str | None = None


def objection(
    weights: WeightScheme,
    activations: ActivationScheme | None,
    kv_cache: KVCacheScheme | None,
) -> str | None:
    """None for NVFP4."""
    if numbers.of(weights).tag != "nvfp4":
        return "modelopt is for NVFP4; for others use compressed-tensors"
    return packing.per_head(NAME, kv_cache)


def misfit(rows: int, columns: int, recipe: Schemes) -> str | None:
    """Groups are whole."""
    return compressed_tensors.misfit(rows, columns, recipe)


def specs(module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
    """The tensors of one layer's weight."""
    rows, columns = weight.shape
    result = [
        TensorSpec(f"{module}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{module}.weight_scale", "F8_E4M3", recipe.weights.n_scales(rows, columns)),
        TensorSpec(f"{module}.weight_scale_2", "F32", ()),
    ]
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
    assert weight.global_scale is not None
    result = {
        f"{module}.weight": compressed_tensors.pack_nibbles(weight.values),
        f"{module}.weight_scale": weight.scale,
        f"{module}.weight_scale_2": weight.global_scale.reciprocal().reshape(()),
    }
    if input_scale is not None:
        result[f"{module}.input_scale"] = input_scale.float().reciprocal().reshape(())
    return result


def unpack(module: str, stored: Mapping[str, "torch.Tensor"], recipe: Schemes) -> "QuantizedWeight":
    """The inverse of `pack`."""
    from quantkit.grid import QuantizedWeight

    return QuantizedWeight(
        compressed_tensors.unpack_nibbles(stored[f"{module}.weight"]),
        stored[f"{module}.weight_scale"],
        None,
        _divisor(stored[f"{module}.weight_scale_2"]),
    )


def input_scale(module: str, stored: Mapping[str, "torch.Tensor"]) -> "torch.Tensor | None":
    """The global scale of a layer's inputs, as a divisor."""
    found = stored.get(f"{module}.input_scale")
    return None if found is None else _divisor(found)


def config(recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
    """The section of `config.json` for serving engines. `ignore` lists every unquantised Linear."""
    return {
        "quant_method": NAME,
        "quant_algo": "NVFP4" if recipe.input_activations else "W4A16_NVFP4",
        "group_size": recipe.weights.group_size,
        "kv_cache_scheme": recipe.kv_cache and recipe.kv_cache.model_dump(),
        "ignore": ignore,
    }


def _divisor(scale: "torch.Tensor") -> "torch.Tensor":
    """The number whose reciprocal a scale is: of the float32 candidates, the roundest.

    Global scales are divided in the dtype of the model, so they have few bits.
    """
    import torch

    scale = scale.float().reshape(1)
    middle = scale.reciprocal()
    near = torch.cat((middle, middle.nextafter(torch.zeros(1)), middle.nextafter(2 * middle)))
    fitting = near[near.reciprocal() == scale]
    if not len(fitting):  # zero or NaN, which `verify` reports
        return middle
    bits = fitting.view(torch.int32)
    return fitting[(bits & -bits).argmax()].reshape(1)
