"""Which tensors a model's GGUF file has, and the source tensors of each; without torch.

How their numbers change is declared here and done in `layout.py`.
"""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.errors import SourceError
from quantkit.families import Family
from quantkit.families.geometry import head_dim
from quantkit.gguf.families import ARCHITECTURES, groups_of, n_experts_of, rope_of, rotary_dim
from quantkit.gguf.names import (
    GGML_QUANT_SIZES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGMLQuantizationType,
    get_tensor_name_map,
)
from quantkit.model.architecture import EXPERT, IGNORABLE
from quantkit.model.headers import WEIGHT_TYPES, TensorSpec

HEAD = "lm_head.weight"
NVFP4_BLOCK = GGML_QUANT_SIZES[GGMLQuantizationType.NVFP4][0]
NUMBER = re.compile(r"\.(\d+)\.")
BLOCK = re.compile(r"^blk\.\d+\.")
AHEAD = ("mtp.", "model.mtp.", "model.mtp_")
"""Beginnings of the names of heads that predict further tokens."""
ENDINGS = {
    "_correction_bias": "_correction.bias",
    ".attention_sink_bias": ".attention_sink_bias.weight",
    ".dt_bias": ".dt_proj.bias",
    ".expert_bias": ".expert_bias.bias",
    ".sinks": ".sinks.weight",
}
"""Endings of names that are neither a weight nor a bias, and what llama.cpp makes of them."""
FLAT = ("exp_probs_b.bias", "shortconv.conv.weight", "ssm_conv1d.weight")
"""Tensors that have a dimension of one in transformers and none in a file."""
ROPE_TENSORS = {
    MODEL_TENSOR.ROPE_FREQS: "llama3",
    MODEL_TENSOR.ROPE_FACTORS_LONG: "long_factor",
    MODEL_TENSOR.ROPE_FACTORS_SHORT: "short_factor",
}


class Change(Enum):
    """What happens to the numbers of a tensor."""

    NONE = "none"
    PERMUTE = "permute"
    """Rows of each head change from two halves to neighbouring pairs."""
    ADD_ONE = "add one"
    RESHAPE = "reshape"
    """Without dimensions of one, or with further ones."""
    STACK = "stack"
    """The same layer of every expert, stacked."""
    NEGATE_EXPONENTIAL = "negate exponential"
    """A state's decay, which is stored as a logarithm."""
    HALVES = "halves"
    """One half of the rows; another tensor has the other."""
    GATED = "gated"
    """Queries, keys and values of all heads, or the gates of all; the model has all four of a key's
    head together.
    """
    HEADS = "heads"
    """Keys or values of every head, of a layer that projects a latent vector up to both; keys are
    transposed.
    """
    COMPUTE = "compute"
    """Not in the source: derived from the config."""


SPLIT = {
    "shared_mlp.input_linear.weight": (
        Change.HALVES, (MODEL_TENSOR.FFN_GATE_SHEXP, MODEL_TENSOR.FFN_UP_SHEXP),
    ),
    "self_attn.kv_b_proj.weight": (
        Change.HEADS, (MODEL_TENSOR.ATTN_K_B, MODEL_TENSOR.ATTN_V_B),
    ),
    "linear_attn.in_proj_qkvz.weight": (
        Change.GATED, (MODEL_TENSOR.ATTN_QKV, MODEL_TENSOR.ATTN_GATE),
    ),
}  # fmt: skip
"""Weights that become two tensors, by their names in a block."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    """In torch's order, rows first."""
    parts: tuple[str, ...]
    """The source tensors that it is built from."""
    change: Change = Change.NONE
    n_heads: int = 0
    """For `PERMUTE`, `GATED` and `HEADS`: the number of heads that the rows hold."""
    module: str | None = None
    """The linear layer whose weight this is; for experts, without their index."""
    rows: tuple[int, int] | None = None
    """For a part of a layer: which rows it is, of all or of every head."""


def tensors_of(
    source: Mapping[str, TensorSpec], family: Family, config: Mapping[str, Any], folder: Path
) -> list[GGUFTensor]:
    """The file's tensors for a model; refuses those that llama.cpp does not know."""
    tensors: list[GGUFTensor] = []
    experts: dict[str, list[TensorSpec]] = {}
    tied = config.get("tie_word_embeddings", False)
    for stored in source.values():
        if any(fnmatch.fnmatchcase(stored.name, pattern) for pattern in IGNORABLE):
            continue
        if (tied and stored.name == HEAD) or is_ahead(stored.name, config):
            continue
        if parts := _split(stored, config):
            tensors += parts
            continue
        if family.experts and (stack := expert_stack(stored.name, family)) is not None:
            experts.setdefault(stack, []).append(stored)
            continue
        called = stored.name
        if not n_experts_of(config):  # Granite's shared expert, alone
            called = called.replace("shared_mlp.output_linear", "mlp.down_proj")
        name = file_name(called, family, config["num_hidden_layers"])
        if name is None or stored.dtype not in WEIGHT_TYPES:
            raise SourceError(
                f"{folder} has {stored.name} ({stored.dtype}), which does not fit a GGUF file of "
                f"architecture {family.llamacpp}; give the model as it was published"
            )
        tensors.append(_tensor(name, stored.name, stored.shape, family, config))
    missing = [n for n in (family.embedding, *(() if tied else (HEAD,))) if n not in source]
    if missing:
        raise SourceError(f"{folder} lacks {missing[0]}; download it again")
    return tensors + _stacks(experts, config, folder) + _computed(config)


def is_ahead(stored: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a head that predicts further tokens: files do without it."""
    found = NUMBER.search(stored)
    n_more = config.get("num_nextn_predict_layers") or 0
    first = config["num_hidden_layers"]
    is_beyond = found is not None and first <= int(found[1]) < first + n_more
    return is_beyond or stored.startswith(AHEAD)


def _split(stored: TensorSpec, config: Mapping[str, Any]) -> list[GGUFTensor]:
    """The tensors of a file that one of the model becomes; empty where it becomes one."""
    found = NUMBER.search(stored.name)
    ending = stored.name[found.end() :] if found else ""
    if found is None or ending not in SPLIT:
        return []
    change, kinds = SPLIT[ending]
    if change is Change.HALVES and not n_experts_of(config):
        kinds = (MODEL_TENSOR.FFN_GATE, MODEL_TENSOR.FFN_UP)
    rows, columns = stored.shape
    shapes: list[tuple[int, ...]] = [(rows // 2, columns)] * 2
    n_heads, half, end = 0, rows // 2, rows
    if change is Change.HEADS:
        n_heads, half = config["num_attention_heads"], config["qk_nope_head_dim"]
        end = half + config["v_head_dim"]
        shapes = [(n_heads, columns, half), (n_heads, end - half, columns)]
    elif change is Change.GATED:
        n_heads = config["linear_num_key_heads"]
        gates = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        half, end = (rows - gates) // n_heads, rows // n_heads
        shapes = [(rows - gates, columns), (gates, columns)]
    names = [f"{TENSOR_NAMES[kind].format(bid=found[1])}.weight" for kind in kinds]
    parts, module = (stored.name,), stored.name.removesuffix(".weight")
    # A transposed weight has other inputs.
    first = None if change is Change.HEADS else module
    return [
        GGUFTensor(names[0], shapes[0], parts, change, n_heads, first, (0, half)),
        GGUFTensor(names[1], shapes[1], parts, change, n_heads, module, (half, end)),
    ]


def file_name(stored: str, family: Family, n_layers: int) -> str | None:
    """A tensor's name in a file; None where llama.cpp has no place for it.

    Blocks share their names, so those of one block are enough.
    """
    found = NUMBER.search(stored)
    if found is not None and int(found[1]) >= n_layers:
        return None
    first = stored if found is None else f"{stored[: found.start()]}.0.{stored[found.end() :]}"
    for ending, name_there in ENDINGS.items():
        first = first.replace(ending, name_there) if first.endswith(ending) else first
    names = _names(family.named_as or family.llamacpp)
    name: str | None = names.get_name(first, try_suffixes=(".weight", ".bias"))
    if name is None or found is None:
        return name
    return BLOCK.sub(f"blk.{int(found[1])}.", name, count=1)


@cache
def _names(architecture: str) -> Any:
    """File names of the first block's tensors, by the model's names."""
    return get_tensor_name_map(ARCHITECTURES[architecture], 1)


EXPERT_TENSORS = (MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP, MODEL_TENSOR.FFN_DOWN_EXP)
"""The experts' gate, up and down projections."""


def expert_stack(stored: str, family: Family) -> str | None:
    """The file's tensor that holds one expert's weight; None for other tensors."""
    found = EXPERT.search(stored)
    block = re.search(r"\.layers\.(\d+)\.", stored)
    layer, _, ending = stored[found.end() :].rpartition(".") if found else ("", "", "")
    if block is None or layer not in family.mlp_parts:
        return None
    kind = EXPERT_TENSORS[family.mlp_parts.index(layer)]
    return f"{TENSOR_NAMES[kind].format(bid=block[1])}.{ending}"


def _stacks(
    experts: Mapping[str, list[TensorSpec]], config: Mapping[str, Any], folder: Path
) -> list[GGUFTensor]:
    """The experts of every block, in order."""
    n_experts = n_experts_of(config)
    stacks = []
    for name, parts in experts.items():
        ordered = sorted(parts, key=lambda spec: _expert_number(spec.name))
        shapes = {spec.shape for spec in ordered}
        if [_expert_number(spec.name) for spec in ordered] != list(range(n_experts)):
            raise SourceError(
                f"{folder} has {len(parts)} experts for {name}, and its config {n_experts}; "
                "download it again"
            )
        if len(shapes) > 1:
            raise SourceError(f"{folder}: experts of {name} have different shapes")
        layer, _, ending = EXPERT.sub(_without_number, ordered[0].name).rpartition(".")
        sources = tuple(spec.name for spec in ordered)
        shape = (n_experts, *ordered[0].shape)
        module = layer if ending == "weight" else None
        stacks.append(GGUFTensor(name, shape, sources, Change.STACK, module=module))
    return stacks


def _without_number(match: re.Match[str]) -> str:
    return match[0].rstrip("0123456789.") + "."


def _expert_number(name: str) -> int:
    found = EXPERT.search(name)
    assert found is not None
    return int(found[0].strip(".").rpartition(".")[2])


def _tensor(
    name: str, stored: str, shape: tuple[int, ...], family: Family, config: Mapping[str, Any]
) -> GGUFTensor:
    change, n_heads = Change.NONE, 0
    is_query, is_key = (f".{part}." in stored for part in ("q_proj", "k_proj"))
    if family.permuted and (is_query or is_key):
        change, n_heads = Change.PERMUTE, shape[0] // head_dim(config)
    elif stored.endswith(".A_log"):
        change = Change.NEGATE_EXPONENTIAL
    elif (
        family.shifted_norms
        and stored.endswith("norm.weight")
        and not stored.endswith("linear_attn.norm.weight")
    ):
        change = Change.ADD_ONE
    elif 1 in shape and name.endswith(FLAT):
        change, shape = Change.RESHAPE, tuple(size for size in shape if size > 1)
    if family.state_space and name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight")):
        change = Change.RESHAPE if change is Change.NONE else change
        n_rows = groups_of(config) if name.endswith("norm.weight") else shape[0]
        shape = (n_rows, shape[0] // n_rows)
    is_linear = len(shape) == 2 and stored.endswith(".weight") and stored != family.embedding
    is_linear = is_linear and change is not Change.RESHAPE
    module = stored.removesuffix(".weight") if is_linear else None
    return GGUFTensor(name, shape, (stored,), change, n_heads, module)


def _computed(config: Mapping[str, Any]) -> list[GGUFTensor]:
    parameters = rope_of(config)
    wanted = {
        tensor
        for tensor, setting in ROPE_TENSORS.items()
        if setting == parameters.get("rope_type") or parameters.get(setting)
    }
    shape = (rotary_dim(config) // 2,)
    return [
        GGUFTensor(f"{TENSOR_NAMES[tensor]}.weight", shape, (), Change.COMPUTE)
        for tensor in ROPE_TENSORS
        if tensor in wanted
    ]


def size_bytes(shape: Sequence[int], kind: GGMLQuantizationType) -> int:
    """Bytes of a tensor of this shape, in torch's order, in a file."""
    weights, block_bytes = GGML_QUANT_SIZES[kind]
    columns = shape[-1] if shape else 1
    assert columns % weights == 0, (
        f"rows of {columns} are not a multiple of {kind.name}'s {weights}"
    )
    return math.prod(shape) // weights * block_bytes
