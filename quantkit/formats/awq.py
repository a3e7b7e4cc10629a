"""AutoAWQ's format in its GEMM version (https://github.com/casper-hansen/AutoAWQ).

    qweight  int32   [columns, rows / 8]   unsigned values, packed across the rows
    qzeros   int32   [groups, rows / 8]    zero points, packed alike
    scales   float16 [groups, rows]

A word holds eight rows, the even ones first: rows 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
A layer without zero points has the middle of the range, 8, for all of them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError
from quantkit.formats import packing
from quantkit.formats.contract import Schemes, wide_inputs
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme
from quantkit.tensorspec import TensorSpec

if TYPE_CHECKING:
    import torch

    from quantkit.grid import QuantizedWeight

NAME = "awq"
SCALE_TYPE: str | None = "float16"
input_scale = wide_inputs
BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = tuple(ORDER.index(place) for place in range(len(ORDER)))


def objection(
    weights: WeightScheme,
    activations: ActivationScheme | None,
    kv_cache: KVCacheScheme | None,
) -> str | None:
    """None if vLLM reads it."""
    if reason := packing.objection(NAME, weights, activations, kv_cache):
        return reason
    if weights.num_bits != BITS:
        return f"awq has 4 bits per weight; for {weights.num_bits} use gptq or compressed-tensors"
    if weights.strategy != "group":
        return "awq has a scale per group; for a scale per row use gptq"
    return None


def misfit(rows: int, columns: int, recipe: Schemes) -> str | None:
    """Words are whole in both directions."""
    return packing.misfit(NAME, rows, columns, BITS)


def specs(module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
    """The tensors of one layer's weight."""
    rows, columns = weight.shape
    n_groups = recipe.weights.n_scales(rows, columns)[1]
    return [
        TensorSpec(f"{module}.qweight", "I32", (columns, rows // len(ORDER))),
        TensorSpec(f"{module}.qzeros", "I32", (n_groups, rows // len(ORDER))),
        # AutoAWQ has no other dtype, whatever the model's is.
        TensorSpec(f"{module}.scales", "F16", (n_groups, rows)),
    ]


def pack(
    module: str,
    weight: "QuantizedWeight",
    recipe: Schemes,
    input_scale: "torch.Tensor | None" = None,
) -> dict[str, "torch.Tensor"]:
    """One layer's quantised weight in the form of `specs`."""
    import torch

    zeros = weight.zero_point
    if zeros is None:
        zeros = torch.zeros(weight.scale.shape, dtype=torch.int8, device=weight.scale.device)
    return {
        f"{module}.qweight": packing.pack(_arranged(weight.values.t(), ORDER), BITS),
        f"{module}.qzeros": packing.pack(_arranged(zeros.t(), ORDER), BITS),
        f"{module}.scales": weight.scale.t().half().contiguous(),
    }


def unpack(module: str, stored: Mapping[str, "torch.Tensor"], recipe: Schemes) -> "QuantizedWeight":
    """The inverse of `pack`."""
    from quantkit.grid import QuantizedWeight

    scales = stored[f"{module}.scales"]
    rows = scales.shape[1]
    values, zeros = (
        _arranged(packing.unpack(stored[f"{module}.{part}"], BITS, rows), INVERSE).t().contiguous()
        for part in ("qweight", "qzeros")
    )
    zero_point: torch.Tensor | None = zeros
    if recipe.weights.symmetric:
        if zeros.any():
            raise CheckpointError(f"{module}.qzeros is not that of a symmetric layer")
        zero_point = None
    return QuantizedWeight(values, scales.t().contiguous(), zero_point)


def config(recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
    """The section of `config.json`. `ignore` lists every unquantised Linear."""
    return {
        "quant_method": NAME,
        "bits": BITS,
        "group_size": recipe.weights.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ignore,
    }


def _arranged(values: "torch.Tensor", order: tuple[int, ...]) -> "torch.Tensor":
    """The same with every eight columns in another order."""
    eights = values.reshape(values.shape[0], -1, len(order))
    return eights[:, :, list(order)].flatten(1)
