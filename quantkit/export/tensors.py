"""Which tensors stand for a quantised layer in each format; without torch.

In vLLM's own format weight-only integers are packed into int32 along the columns (`weight_packed`,
with the shape beside it); 8-bit weights for 8-bit activations stay one value a byte (`weight`).
Scales are [rows, tiles of a row], or [1] for one scale a tensor. AutoGPTQ's and AutoAWQ's tensors
have columns first (a layer's inputs), native FP8 keeps its scales in float32.
"""

from quantkit import formats
from quantkit.model.headers import TensorSpec
from quantkit.recipe import Recipe


def layout(recipe: Recipe) -> str:
    """The name that compressed-tensors has for this way of storing weights."""
    if recipe.weights.type == "float":
        return "float-quantized"
    return "pack-quantized" if recipe.input_activations is None else "int-quantized"


def specs(module: str, weight: TensorSpec, recipe: Recipe) -> list[TensorSpec]:
    """The tensors that stand for one layer's weight: exactly these, in this order."""
    rows, columns = weight.shape
    if recipe.format == formats.GPTQ:
        return _gptq(module, rows, columns, weight.dtype, recipe)
    if recipe.format == formats.AWQ:
        return _awq(module, rows, columns, recipe)
    if recipe.format == formats.FP8:
        return _fp8(module, rows, columns, recipe)
    return _compressed_tensors(module, weight, recipe)


def _compressed_tensors(module: str, weight: TensorSpec, recipe: Recipe) -> list[TensorSpec]:
    rows, columns = weight.shape
    scheme = recipe.weights
    shape = (1,) if scheme.strategy == "tensor" else _tiles(rows, columns, recipe)
    scale = TensorSpec(f"{module}.weight_scale", weight.dtype, shape)
    if layout(recipe) != "pack-quantized":
        dtype = "F8_E4M3" if scheme.type == "float" else "I8"
        result = [TensorSpec(f"{module}.weight", dtype, (rows, columns)), scale]
        if _is_static(recipe):
            result.append(TensorSpec(f"{module}.input_scale", weight.dtype, (1,)))
        return result
    per_word = 32 // scheme.num_bits
    result = [
        TensorSpec(f"{module}.weight_packed", "I32", (rows, -(-columns // per_word))),
        scale,
        TensorSpec(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric:
        packed = (-(-rows // per_word), _tiles(rows, columns, recipe)[1])
        result.append(TensorSpec(f"{module}.weight_zero_point", "I32", packed))
    return result


def _gptq(module: str, rows: int, columns: int, dtype: str, recipe: Recipe) -> list[TensorSpec]:
    per_word = 32 // recipe.weights.num_bits
    n_groups = _tiles(rows, columns, recipe)[1]
    return [
        TensorSpec(f"{module}.qweight", "I32", (columns // per_word, rows)),
        TensorSpec(f"{module}.qzeros", "I32", (n_groups, rows // per_word)),
        TensorSpec(f"{module}.scales", dtype, (n_groups, rows)),
        TensorSpec(f"{module}.g_idx", "I32", (columns,)),
    ]


def _awq(module: str, rows: int, columns: int, recipe: Recipe) -> list[TensorSpec]:
    per_word = 32 // recipe.weights.num_bits
    n_groups = _tiles(rows, columns, recipe)[1]
    return [
        TensorSpec(f"{module}.qweight", "I32", (columns, rows // per_word)),
        TensorSpec(f"{module}.qzeros", "I32", (n_groups, rows // per_word)),
        # AutoAWQ knows no other type, whatever the model has.
        TensorSpec(f"{module}.scales", "F16", (n_groups, rows)),
    ]


def _fp8(module: str, rows: int, columns: int, recipe: Recipe) -> list[TensorSpec]:
    weight = TensorSpec(f"{module}.weight", "F8_E4M3", (rows, columns))
    if recipe.weights.strategy == "block":
        # DeepSeek's name for it; it multiplies like any other scale.
        shape = _tiles(rows, columns, recipe)
        return [weight, TensorSpec(f"{module}.weight_scale_inv", "F32", shape)]
    result = [weight, TensorSpec(f"{module}.weight_scale", "F32", ())]
    if _is_static(recipe):
        result.append(TensorSpec(f"{module}.input_scale", "F32", ()))
    return result


def _tiles(rows: int, columns: int, recipe: Recipe) -> tuple[int, int]:
    """How many scales there are, down and across."""
    scheme = recipe.weights
    if scheme.block_structure is not None:
        high, wide = scheme.block_structure
        return rows // high, columns // wide
    size = scheme.group_size if scheme.strategy == "group" else columns
    assert isinstance(size, int)
    return rows, columns // size


def _is_static(recipe: Recipe) -> bool:
    return recipe.input_activations is not None and not recipe.input_activations.dynamic


def kv_specs(attention: str, dtype: str) -> list[TensorSpec]:
    """The scales of one attention module's keys and values."""
    return [TensorSpec(f"{attention}.{kind}_scale", dtype, (1,)) for kind in ("k", "v")]
