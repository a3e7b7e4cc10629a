"""Which tensors stand for a quantised layer in vLLM's own format; without torch.

Weight-only integers are packed into int32 along the columns (`weight_packed`, with the shape
beside it); 8-bit weights for 8-bit activations stay one value a byte (`weight`). Scales are
[rows, tiles of a row], or [1] for one scale a tensor.
"""

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
    scheme = recipe.weights
    if scheme.strategy == "tensor":
        scale_shape: tuple[int, ...] = (1,)
    elif scheme.block_structure is not None:
        high, wide = scheme.block_structure
        scale_shape = (rows // high, columns // wide)
    else:
        size = scheme.group_size if scheme.strategy == "group" else columns
        assert isinstance(size, int)
        scale_shape = (rows, columns // size)
    scale = TensorSpec(f"{module}.weight_scale", weight.dtype, scale_shape)
    if layout(recipe) != "pack-quantized":
        dtype = "F8_E4M3" if scheme.type == "float" else "I8"
        result = [TensorSpec(f"{module}.weight", dtype, (rows, columns)), scale]
        if recipe.input_activations is not None and not recipe.input_activations.dynamic:
            result.append(TensorSpec(f"{module}.input_scale", weight.dtype, (1,)))
        return result
    per_word = 32 // scheme.num_bits
    result = [
        TensorSpec(f"{module}.weight_packed", "I32", (rows, -(-columns // per_word))),
        scale,
        TensorSpec(f"{module}.weight_shape", "I64", (2,)),
    ]
    if not scheme.symmetric:
        packed = (-(-rows // per_word), scale_shape[1])
        result.append(TensorSpec(f"{module}.weight_zero_point", "I32", packed))
    return result


def kv_specs(attention: str, dtype: str) -> list[TensorSpec]:
    """The scales of one attention module's keys and values."""
    return [TensorSpec(f"{attention}.{kind}_scale", dtype, (1,)) for kind in ("k", "v")]
