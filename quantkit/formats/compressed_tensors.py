"""compressed-tensors, vLLM's own format: it holds everything a recipe can express."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit import numbers
from quantkit.formats import packing
from quantkit.formats.contract import Schemes
from quantkit.numbers import channel_scales
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme
from quantkit.tensorspec import TensorSpec

if TYPE_CHECKING:
    import torch

    from quantkit.grid import QuantizedWeight

NAME = "compressed-tensors"
SCALE_TYPE: str | None = None
FLOATS = {
    "fp8": "float-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
}
"""The library's names for floats, by the number's tag."""
SCALE_DTYPES = {"F8_E4M3": "torch.float8_e4m3fn", "U8": "torch.uint8"}
SQUARE = 128
"""Tile size of the kernel for 4-bit weights and FP8 activations."""


def objection(
    weights: WeightScheme,
    activations: ActivationScheme | None,
    kv_cache: KVCacheScheme | None,
) -> str | None:
    """None: it holds everything a recipe can express."""
    return None


def misfit(rows: int, columns: int, recipe: Schemes) -> str | None:
    """Shapes that engines' kernels do not support; the rest is checked by the scheme."""
    number, inputs = numbers.of(recipe.weights), recipe.input_activations
    size = recipe.weights.group_size
    if number.has_own_scales and isinstance(size, int) and columns % size:
        name = number.words.partition(" ")[0]
        return f"{name} has groups of {size} columns; put it into `ignore`"
    if channel_scales.apply_to(recipe.weights, inputs) and (rows % SQUARE or columns % SQUARE):
        return f"W4AFP8 needs rows and columns in multiples of {SQUARE}; put it into `ignore`"
    return None


def layout(recipe: Schemes) -> str:
    """The library's name for this way of storing weights."""
    weights, inputs = recipe.weights, recipe.input_activations
    if weights.type == "float":
        return FLOATS[numbers.of(weights).tag]
    is_packed = inputs is None or channel_scales.apply_to(weights, inputs)
    return "pack-quantized" if is_packed else "int-quantized"


def specs(module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
    """The tensors of one layer's weight.

    Weight-only integers are packed into int32 along the columns (`weight_packed`, with the shape
    beside it); 8-bit weights for 8-bit activations stay one value per byte (`weight`). Scales are
    [rows, tiles per row], or [1] for one scale per tensor.
    """
    rows, columns = weight.shape
    scheme = recipe.weights
    number = numbers.of(scheme)
    tiles = scheme.n_scales(rows, columns)
    shape = (1,) if scheme.strategy == "tensor" else tiles
    scale = TensorSpec(f"{module}.weight_scale", number.scale_file_type or weight.dtype, shape)
    if number.file_type == "U8":
        result = [TensorSpec(f"{module}.weight_packed", "U8", (rows, columns // 2)), scale]
        if number.has_global_scale:
            result.append(TensorSpec(f"{module}.weight_global_scale", "F32", (1,)))
            if recipe.has_static_inputs:
                result.append(TensorSpec(f"{module}.input_global_scale", "F32", (1,)))
        return result
    if layout(recipe) != "pack-quantized":
        result = [TensorSpec(f"{module}.weight", number.file_type, (rows, columns)), scale]
        if recipe.has_static_inputs:
            result.append(TensorSpec(f"{module}.input_scale", weight.dtype, (1,)))
        return result
    n_words = packing.n_words(columns, scheme.num_bits)
    result = [
        TensorSpec(f"{module}.weight_packed", "I32", (rows, n_words)),
        scale,
        TensorSpec(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric:
        packed = (packing.n_words(rows, scheme.num_bits), tiles[1])
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
    if numbers.of(scheme).file_type == "U8":
        result[f"{module}.weight_packed"] = pack_nibbles(weight.values)
        if weight.global_scale is not None:
            result[f"{module}.weight_global_scale"] = weight.global_scale
        if input_scale is not None:
            result[f"{module}.input_global_scale"] = input_scale
        return result
    if input_scale is not None:
        result[f"{module}.input_scale"] = input_scale
    if layout(recipe) != "pack-quantized":
        result[f"{module}.weight"] = weight.values
        return result
    result[f"{module}.weight_packed"] = packing.pack(weight.values, scheme.num_bits)
    result[f"{module}.weight_shape"] = torch.tensor(weight.values.shape)
    if weight.zero_point is not None:
        packed = packing.pack(weight.zero_point.t(), scheme.num_bits).t().contiguous()
        result[f"{module}.weight_zero_point"] = packed
    return result


def unpack(module: str, stored: Mapping[str, "torch.Tensor"], recipe: Schemes) -> "QuantizedWeight":
    """The inverse of `pack`."""
    from quantkit.grid import QuantizedWeight

    scheme = recipe.weights
    scale = stored[f"{module}.weight_scale"]
    if numbers.of(scheme).file_type == "U8":
        values = unpack_nibbles(stored[f"{module}.weight_packed"])
        return QuantizedWeight(values, scale, None, stored.get(f"{module}.weight_global_scale"))
    if layout(recipe) != "pack-quantized":
        return QuantizedWeight(stored[f"{module}.weight"], scale, None)
    rows, columns = (int(n) for n in stored[f"{module}.weight_shape"])
    values = packing.unpack(stored[f"{module}.weight_packed"], scheme.num_bits, columns)
    zero_point = None
    if not scheme.symmetric:
        packed = stored[f"{module}.weight_zero_point"]
        zero_point = packing.unpack(packed.t(), scheme.num_bits, rows).t().contiguous()
    return QuantizedWeight(values, scale, zero_point)


def pack_nibbles(codes: "torch.Tensor") -> "torch.Tensor":
    """Two codes per byte, the first in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: "torch.Tensor") -> "torch.Tensor":
    """The inverse of `pack_nibbles`."""
    import torch

    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def input_scale(module: str, stored: Mapping[str, "torch.Tensor"]) -> "torch.Tensor | None":
    """The one scale of a layer's inputs, or the global one of NVFP4."""
    return stored.get(f"{module}.input_scale", stored.get(f"{module}.input_global_scale"))


def config(recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
    """The section of `config.json` for serving engines. `ignore` lists every unquantised Linear."""
    parts = recipe.parts
    names = list(dict.fromkeys(layout(part) for part in parts))
    targets = [["Linear"], *recipe.group_targets]
    return {
        "quant_method": NAME,
        "format": names[0] if len(names) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": recipe.kv_cache and recipe.kv_cache.model_dump(),
        "config_groups": {
            f"group_{place}": {
                "targets": named,
                "weights": _weight_arguments(part.weights),
                "input_activations": part.input_activations and _arguments(part.input_activations),
                "output_activations": None,
                "format": layout(part),
            }
            for place, (part, named) in enumerate(zip(parts, targets, strict=True))
        },
        "ignore": ignore,
    }


def _weight_arguments(scheme: WeightScheme) -> dict[str, Any]:
    arguments = {**_arguments(scheme), "dynamic": False}
    arguments["block_structure"] = scheme.block_structure and list(scheme.block_structure)
    return arguments


def _arguments(scheme: WeightScheme | ActivationScheme) -> dict[str, Any]:
    kind = numbers.of(scheme).scale_file_type
    own = {} if kind is None else {"scale_dtype": SCALE_DTYPES[kind]}
    return {**scheme.model_dump(), **own}
