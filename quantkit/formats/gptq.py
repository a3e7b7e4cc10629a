"""AutoGPTQ's format (https://github.com/AutoGPTQ/AutoGPTQ), as vLLM and GPTQModel read it.

    qweight  int32 [columns / per word, rows]   unsigned values, packed down the columns
    qzeros   int32 [groups, rows / per word]    zero points less one, packed across the rows
    scales         [groups, rows]               in the model's own dtype
    g_idx    int32 [columns]                    the group of each column: here simply in order

Without zero points the middle of the range stands for zero: 8 of 16, or 128 of 256. Zero points are
stored minus one for historical reasons; readers add it again ("v1").
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

NAME = "gptq"
SCALE_TYPE: str | None = None
input_scale = wide_inputs


def objection(
    weights: WeightScheme,
    activations: ActivationScheme | None,
    kv_cache: KVCacheScheme | None,
) -> str | None:
    """None if vLLM reads it."""
    if reason := packing.objection(NAME, weights, activations, kv_cache):
        return reason
    if weights.num_bits not in (4, 8):
        return f"vLLM reads gptq with 4 or 8 bits; for {weights.num_bits} use compressed-tensors"
    if not weights.symmetric:
        return "vLLM reads gptq only without zero points; use awq or compressed-tensors"
    return None


def misfit(rows: int, columns: int, recipe: Schemes) -> str | None:
    """Words are whole in both directions."""
    return packing.misfit(NAME, rows, columns, recipe.weights.num_bits)


def specs(module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
    """The tensors of one layer's weight."""
    rows, columns = weight.shape
    per_word = 32 // recipe.weights.num_bits
    n_groups = recipe.weights.n_scales(rows, columns)[1]
    return [
        TensorSpec(f"{module}.qweight", "I32", (columns // per_word, rows)),
        TensorSpec(f"{module}.qzeros", "I32", (n_groups, rows // per_word)),
        TensorSpec(f"{module}.scales", weight.dtype, (n_groups, rows)),
        TensorSpec(f"{module}.g_idx", "I32", (columns,)),
    ]


def pack(
    module: str,
    weight: "QuantizedWeight",
    recipe: Schemes,
    input_scale: "torch.Tensor | None" = None,
) -> dict[str, "torch.Tensor"]:
    """One layer's quantised weight in the form of `specs`."""
    import torch

    bits = recipe.weights.num_bits
    rows, columns = weight.values.shape
    n_groups = weight.scale.shape[1]
    device = weight.values.device
    zeros = torch.full((n_groups, rows), -1, dtype=torch.int8, device=device)
    return {
        f"{module}.qweight": packing.pack(weight.values, bits).t().contiguous(),
        f"{module}.qzeros": packing.pack(zeros, bits),
        f"{module}.scales": weight.scale.t().contiguous(),
        f"{module}.g_idx": _groups(columns, n_groups).to(device),
    }


def unpack(module: str, stored: Mapping[str, "torch.Tensor"], recipe: Schemes) -> "QuantizedWeight":
    """The inverse of `pack`; non-default zero points or column orders are refused."""
    import torch

    from quantkit.grid import QuantizedWeight

    bits = recipe.weights.num_bits
    scales = stored[f"{module}.scales"]
    n_groups, rows = scales.shape
    packed = stored[f"{module}.qweight"]
    columns = packed.shape[0] * (32 // bits)
    order = stored[f"{module}.g_idx"]
    if not torch.equal(order, _groups(columns, n_groups).to(order.device)):
        raise CheckpointError(f"{module}.g_idx does not list groups in order: it has an act-order")
    if not (packing.unpack(stored[f"{module}.qzeros"], bits, rows) == -1).all():
        raise CheckpointError(f"{module}.qzeros is not that of a symmetric layer")
    return QuantizedWeight(packing.unpack(packed.t(), bits, columns), scales.t().contiguous(), None)


def config(recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
    """The section of `config.json`. vLLM recognises unquantised layers by their tensors."""
    return {
        "quant_method": NAME,
        "bits": recipe.weights.num_bits,
        "group_size": recipe.weights.group_size if recipe.weights.strategy == "group" else -1,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": NAME,
    }


def _groups(columns: int, n_groups: int) -> "torch.Tensor":
    import torch

    return torch.arange(n_groups, dtype=torch.int32).repeat_interleave(columns // n_groups)
