"""A model's tensors as llama.cpp names and arranges them, and the inverse mapping.

Most tensors are only renamed. Queries and keys of some families are reordered, since llama.cpp
rotates neighbouring columns where transformers rotates the halves of a head; Gemma's norms store
the 1 that transformers adds at run time; a block's experts are stacked into one tensor; factors for
rotary frequencies are tensors there and config settings here. A layer that projects a latent vector
up to keys and values becomes two tensors. Tied heads are left out: llama.cpp then uses the
embedding.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from gguf import TENSOR_NAMES

from quantkit.families import Family
from quantkit.gguf.families import (
    family_of,
    metadata_of,
    read_config,
    rope_of,
    rotary_dim,
)
from quantkit.gguf.tensors import ROPE_TENSORS, GGUFTensor, tensors_of
from quantkit.gguf.tensors import Change as Change
from quantkit.gguf.writer import Value
from quantkit.model.architecture import Architecture
from quantkit.model.headers import TensorSpec
from quantkit.model.source import read_config as read_json


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
class Layout:
    """The contents of a model's GGUF file except for the vocabulary."""

    source: "Described"
    family: Family
    config: Mapping[str, Any]
    tensors: list[GGUFTensor]
    metadata: dict[str, Value]
    """Keys of the architecture, such as `llama.block_count`."""

    @classmethod
    def of(cls, source: "Described") -> "Layout":
        """Map all tensors of a model; refuse those that llama.cpp does not know."""
        family = family_of(source.config, source.folder)
        config = read_config(source.folder)
        metadata = metadata_of(family, config, source.folder)
        tensors = tensors_of(source.tensors, family, config, source.folder)
        return cls(source, family, config, tensors, metadata)

    @classmethod
    def of_folder(cls, folder: Path, trust_remote_code: bool = False) -> "Layout":
        """The same from a config alone, without the tensors."""
        shapes = Architecture.of(folder, trust_remote_code).shapes
        specs = {name: TensorSpec(name, "F32", shape) for name, shape in shapes.items()}
        return cls.of(_Skeleton(folder, read_json(folder), specs))

    @property
    def architecture(self) -> str:
        """llama.cpp's name for it."""
        return self.family.llamacpp

    @cached_property
    def by_name(self) -> dict[str, GGUFTensor]:
        """The tensors by their GGUF names."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def n_vocabulary(self) -> int:
        """Rows of the embedding: how many tokens the file's vocabulary must have."""
        return self.source.tensors[self.family.embedding].shape[0]

    def build(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """Read a tensor as the file stores it, into host memory unless a device is given.

        In the source's dtype, or float32 where the numbers change.
        """
        tensor = self.by_name[name]
        if tensor.change is Change.COMPUTE:
            return _rope_factors(name, self.config).to(device)
        pinned = device is not None and device.type == "cuda"
        parts = (self.source.tensors[part].read(pinned) for part in tensor.parts)
        weights = [part.to(device, non_blocking=True) for part in parts]
        if tensor.change is Change.STACK:
            return torch.stack(weights)
        (weight,) = weights
        return self.arranged(tensor, weight)

    def arranged(self, tensor: GGUFTensor, weight: torch.Tensor) -> torch.Tensor:
        """The numbers of a source tensor in the file's order."""
        if tensor.change is Change.PERMUTE:
            return _pairs(weight, tensor.n_heads)
        if tensor.change is Change.ADD_ONE:
            return weight.float() + 1
        if tensor.change is Change.NEGATE_EXPONENTIAL:
            return -weight.float().exp().reshape(tensor.shape)
        if tensor.change is Change.RESHAPE:
            return weight.reshape(tensor.shape)
        if tensor.rows is not None:
            return _cut(tensor, weight)
        return weight

    def restore_one(self, tensor: GGUFTensor, weight: torch.Tensor) -> torch.Tensor:
        """The numbers of one source tensor in their original order: the inverse of `arranged`."""
        if tensor.change is Change.PERMUTE:
            return _halves(weight, tensor.n_heads)
        if tensor.change is Change.NEGATE_EXPONENTIAL:
            return (-weight).log().reshape(self.source.tensors[tensor.parts[0]].shape)
        if tensor.change is Change.RESHAPE:
            return weight.reshape(self.source.tensors[tensor.parts[0]].shape)
        return weight - 1 if tensor.change is Change.ADD_ONE else weight

    def restore(self, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The source tensors that a file's tensors stand for: the inverse of `build`.

        Exact for reordered tensors; where 1 was added, exact to the last bit of a float32 near 1.
        """
        for tensor in self.tensors:
            if tensor.change is Change.COMPUTE:
                continue
            if tensor.change is Change.STACK:
                yield from zip(tensor.parts, read(tensor.name), strict=True)
            elif tensor.rows is None:
                yield tensor.parts[0], self.restore_one(tensor, read(tensor.name))
            elif tensor.rows[0] == 0:
                both = [one for one in self.tensors if one.parts == tensor.parts]
                yield tensor.parts[0], _joined(both, [read(one.name) for one in both])


def _pairs(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Reorder each head's rows from [first half, second half] to neighbouring pairs."""
    shape = weight.shape
    return weight.reshape(n_heads, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)


def _halves(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """The inverse of `_pairs`."""
    shape = weight.shape
    return weight.reshape(n_heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _cut(tensor: GGUFTensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows of a layer that one of its two tensors holds."""
    assert tensor.rows is not None
    rows = slice(*tensor.rows)
    if tensor.change is Change.HALVES:
        return weight[rows]
    heads = weight.reshape(tensor.n_heads, -1, weight.shape[1])
    if tensor.change is Change.GATED:
        return torch.cat([part.flatten(0, 1) for part in _gated(tensor, heads)])
    heads = heads[:, rows]
    # Keys, the first rows, multiply queries from the other side.
    return (heads.transpose(1, 2) if rows.start == 0 else heads).contiguous()


def _joined(tensors: Sequence[GGUFTensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of `_cut`."""
    first, second = weights
    if tensors[0].change is Change.HALVES:
        return torch.cat((first, second))
    if tensors[0].change is Change.GATED:
        n_heads, columns = tensors[0].n_heads, first.shape[1]
        gates = second.shape[0]
        keys = (first.shape[0] - gates) // 2
        every = (*torch.split(first, [keys, keys, gates]), second)
        return torch.cat([part.view(n_heads, -1, columns) for part in every], 1).flatten(0, 1)
    return torch.cat((first.transpose(1, 2), second), dim=1).flatten(0, 1)


def _gated(tensor: GGUFTensor, heads: torch.Tensor) -> Sequence[torch.Tensor]:
    """Queries, keys and values, or gates; as many gates as values."""
    assert tensor.rows is not None
    start, end = tensor.rows
    if start:
        return (heads[:, start:end],)
    gates = heads.shape[1] - end
    keys = (end - gates) // 2
    return torch.split(heads[:, :end], [keys, keys, gates], dim=1)


def _rope_factors(name: str, config: Mapping[str, Any]) -> torch.Tensor:
    """Divisors of the rotary frequencies."""
    parameters = rope_of(config)
    for tensor, setting in ROPE_TENSORS.items():
        if name == f"{TENSOR_NAMES[tensor]}.weight" and parameters.get(setting):
            return torch.tensor(parameters[setting], dtype=torch.float32)
    return llama3_factors(parameters, rotary_dim(config))


def llama3_factors(parameters: Mapping[str, Any], n_columns: int) -> torch.Tensor:
    """Llama 3.1: slow frequencies are divided, fast ones kept, those in between blended."""
    exponents = torch.arange(0, n_columns, 2, dtype=torch.float32) / n_columns
    turns = parameters["original_max_position_embeddings"] / (
        2 * math.pi * parameters["rope_theta"] ** exponents
    )
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - kept) / parameters["factor"] + kept)
