"""A model's tensors as llama.cpp names and arranges them, and the way back.

Most tensors only change their name. Queries and keys of some families are reordered, since
llama.cpp rotates neighbouring columns where transformers rotates the halves of a head; Gemma's
norms get the one added that transformers adds when it runs; factors for rotary frequencies are
tensors there and settings here. Tied heads are left out: llama.cpp then uses the embedding.
"""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from gguf import MODEL_TENSOR, TENSOR_NAMES, get_tensor_name_map

from quantkit.errors import SourceError
from quantkit.gguf.families import (
    Family,
    family_of,
    head_dim,
    metadata_of,
    read_config,
    rope_of,
    rotary_dim,
)
from quantkit.gguf.writer import Value
from quantkit.model.architecture import IGNORABLE, Architecture
from quantkit.model.shards import TensorSpec
from quantkit.model.source import WEIGHT_TYPES
from quantkit.model.source import read_config as read_json

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
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


class Described(Protocol):
    """A model of which only config and tensors matter: a source, or a file made from one."""

    @property
    def folder(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class _Skeleton:
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSpec]


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

    @property
    def is_linear_weight(self) -> bool:
        """Whether this is what a quantiser may round."""
        return self.module is not None


@dataclass(frozen=True)
class Layout:
    """What a GGUF file of a model holds besides the vocabulary."""

    source: "Described"
    family: Family
    config: Mapping[str, Any]
    tensors: list[GGUFTensor]
    metadata: dict[str, Value]
    """Keys of the architecture, such as `llama.block_count`."""

    @classmethod
    def of(cls, source: "Described") -> "Layout":
        """Map all tensors of a model, refusing what llama.cpp does not know."""
        family = family_of(source.config, source.folder)
        config = read_config(source.folder)
        metadata = metadata_of(family, config, source.folder)
        names = get_tensor_name_map(family.arch, config["num_hidden_layers"])
        tensors = []
        tied = config.get("tie_word_embeddings", False)
        for stored in source.tensors.values():
            if any(fnmatch.fnmatchcase(stored.name, pattern) for pattern in IGNORABLE):
                continue
            if tied and stored.name == HEAD:
                continue
            name = names.get_name(stored.name, try_suffixes=(".weight", ".bias"))
            if name is None or stored.dtype not in WEIGHT_TYPES:
                raise SourceError(
                    f"{source.folder} has {stored.name} ({stored.dtype}), which has no place in a "
                    f"GGUF file of architecture {family.name}; give the model as it was published"
                )
            tensors.append(_tensor(name, stored.name, stored.shape, family, config))
        missing = [n for n in (EMBEDDING, *(() if tied else (HEAD,))) if n not in source.tensors]
        if missing:
            raise SourceError(f"{source.folder} lacks {missing[0]}; download it again")
        return cls(source, family, config, tensors + _computed(config), metadata)

    @classmethod
    def of_folder(cls, folder: Path, trust_remote_code: bool = False) -> "Layout":
        """The same from a config alone, whose tensors are elsewhere."""
        shapes = Architecture.of(folder, trust_remote_code).shapes
        specs = {name: TensorSpec(name, "F32", shape) for name, shape in shapes.items()}
        return cls.of(_Skeleton(folder, read_json(folder), specs))

    @property
    def architecture(self) -> str:
        """llama.cpp's name for it."""
        return self.family.name

    @cached_property
    def by_name(self) -> dict[str, GGUFTensor]:
        """The tensors under their GGUF names."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def n_vocabulary(self) -> int:
        """Rows of the embedding: how many tokens the file's vocabulary must have."""
        return self.source.tensors[EMBEDDING].shape[0]

    def build(self, name: str) -> torch.Tensor:
        """A tensor as the file holds it, read when asked for.

        In the source's type, or float32 where numbers change.
        """
        tensor = self.by_name[name]
        if tensor.change is Change.COMPUTE:
            return _rope_factors(name, self.config)
        weight = self.source.tensors[tensor.parts[0]].read()
        if tensor.change is Change.PERMUTE:
            return _pairs(weight, tensor.n_heads)
        if tensor.change is Change.ADD_ONE:
            return weight.float() + 1
        return weight

    def restore(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The source's tensors that a tensor of the file stands for: the inverse of `build`.

        Exact for reordered tensors; where one was added, to the last bit of a float32 near one.
        """
        tensor = self.by_name[name]
        if tensor.change is Change.COMPUTE:
            return {}
        if tensor.change is Change.PERMUTE:
            weight = _halves(weight, tensor.n_heads)
        elif tensor.change is Change.ADD_ONE:
            weight = weight - 1
        return {tensor.parts[0]: weight}


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


def _pairs(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of each head from [first half, second half] to [first, second] of every pair."""
    shape = weight.shape
    return weight.reshape(n_heads, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)


def _halves(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The inverse of `_pairs`."""
    shape = weight.shape
    return weight.reshape(n_heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)


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


def _rope_factors(name: str, config: Mapping[str, Any]) -> torch.Tensor:
    """What rotary frequencies are divided by."""
    parameters = rope_of(config)
    for tensor, setting in ROPE_TENSORS.items():
        if name == f"{TENSOR_NAMES[tensor]}.weight" and parameters.get(setting):
            return torch.tensor(parameters[setting], dtype=torch.float32)
    return _llama3_factors(parameters, rotary_dim(config))


def _llama3_factors(parameters: Mapping[str, Any], n_columns: int) -> torch.Tensor:
    """Llama 3.1: slow frequencies are divided, fast ones stay, those between are blended."""
    exponents = torch.arange(0, n_columns, 2, dtype=torch.float32) / n_columns
    turns = parameters["original_max_position_embeddings"] / (
        2 * math.pi * parameters["rope_theta"] ** exponents
    )
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - kept) / parameters["factor"] + kept)
