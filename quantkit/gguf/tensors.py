"""Which tensors a GGUF file of a model has, and what each takes; without torch.

What becomes of their numbers is said here and done in `layout.py`.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from quantkit.errors import SourceError
from quantkit.families import Family
from quantkit.families.geometry import head_dim
from quantkit.gguf.families import ARCHITECTURES, rope_of, rotary_dim
from quantkit.gguf.names import (
    GGML_QUANT_SIZES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGMLQuantizationType,
    get_tensor_name_map,
)
from quantkit.model.architecture import IGNORABLE
from quantkit.model.headers import WEIGHT_TYPES, TensorSpec

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
NVFP4_BLOCK = GGML_QUANT_SIZES[GGMLQuantizationType.NVFP4][0]
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
    COMPUTE = "compute"
    """There is no such tensor in the source: it comes from the config."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    """In torch's order, rows first."""
    parts: tuple[str, ...]
    """The tensors of the source that it is made from."""
    change: Change = Change.NONE
    n_heads: int = 0
    """For `PERMUTE`: how many heads the rows hold."""
    module: str | None = None
    """The linear layer whose weight this is."""


def tensors_of(
    source: Mapping[str, TensorSpec], family: Family, config: Mapping[str, Any], folder: Path
) -> list[GGUFTensor]:
    """The tensors that a model's own become, refusing what llama.cpp does not know."""
    names = get_tensor_name_map(ARCHITECTURES[family.llamacpp], config["num_hidden_layers"])
    tensors = []
    tied = config.get("tie_word_embeddings", False)
    for stored in source.values():
        if any(fnmatch.fnmatchcase(stored.name, pattern) for pattern in IGNORABLE):
            continue
        if tied and stored.name == HEAD:
            continue
        name = names.get_name(stored.name, try_suffixes=(".weight", ".bias"))
        if name is None or stored.dtype not in WEIGHT_TYPES:
            raise SourceError(
                f"{folder} has {stored.name} ({stored.dtype}), which has no place in a "
                f"GGUF file of architecture {family.llamacpp}; give the model as it was published"
            )
        tensors.append(_tensor(name, stored.name, stored.shape, family, config))
    missing = [n for n in (EMBEDDING, *(() if tied else (HEAD,))) if n not in source]
    if missing:
        raise SourceError(f"{folder} lacks {missing[0]}; download it again")
    return tensors + _computed(config)


def _tensor(
    name: str, stored: str, shape: tuple[int, ...], family: Family, config: Mapping[str, Any]
) -> GGUFTensor:
    change, n_heads = Change.NONE, 0
    is_query, is_key = (f".{part}." in stored for part in ("q_proj", "k_proj"))
    if family.permuted and (is_query or is_key):
        change, n_heads = Change.PERMUTE, shape[0] // head_dim(config)
    elif family.shifted_norms and stored.endswith("norm.weight"):
        change = Change.ADD_ONE
    is_linear = len(shape) == 2 and stored.endswith(".weight") and stored != EMBEDDING
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
    """Bytes that a tensor of this shape, in torch's order, takes in a file."""
    weights, block_bytes = GGML_QUANT_SIZES[kind]
    columns = shape[-1] if shape else 1
    assert columns % weights == 0, f"rows of {columns} are no multiple of {kind.name}'s {weights}"
    return math.prod(shape) // weights * block_bytes
