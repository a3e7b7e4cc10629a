"""Safetensors files: tensors read one by one, files written as a stream.

The library's own reader maps files into memory and its writer needs all tensors of a file at once.
Here a tensor is read into memory we own (so it can be pinned and freed), and a file's layout is
fixed before the first tensor exists: the header is written first, then every tensor to its place in
any order and from any thread.
"""

import json
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.model.dtypes import CODES as CODES
from quantkit.model.dtypes import DTYPES as DTYPES
from quantkit.model.dtypes import as_bytes as as_bytes
from quantkit.model.file_writer import FileWriter
from quantkit.model.headers import StoredTensor as StoredTensor
from quantkit.model.headers import TensorSpec as TensorSpec
from quantkit.model.headers import read_header as read_header


def to_host(tensor: torch.Tensor, wait: bool = True) -> torch.Tensor:
    """A contiguous copy in host memory; from a GPU through pinned memory, several times as fast.

    Without `wait` a copy from a GPU is only started: an event on its stream signals completion.
    """
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=not wait)


class ShardWriter:
    """One safetensors file whose tensors arrive in any order."""

    def __init__(
        self, path: Path, specs: Iterable[TensorSpec], present: Container[str] = ()
    ) -> None:
        """`present` names tensors that an earlier writer of the same file has already written."""
        self.path = path
        self._specs = {spec.name: spec for spec in specs}
        head, places, size = _layout(self._specs.values())
        self._file = FileWriter(path, head, places, size, present)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor."""
        self.write_bytes(name, self._bytes(name, tensor))

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite a tensor that was already written."""
        self._file.replace(name, self._bytes(name, tensor))

    def _bytes(self, name: str, tensor: torch.Tensor) -> memoryview:
        spec = self._specs[name]
        assert tensor.dtype == DTYPES[spec.dtype], f"{name}: {tensor.dtype} is not {spec.dtype}"
        assert tuple(tensor.shape) == spec.shape, f"{name}: {tensor.shape} is not {spec.shape}"
        return as_bytes(to_host(tensor))

    def write_bytes(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Write a part of a tensor."""
        self._file.write(name, buffer, offset)

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor is, for reading it back before the file is closed."""
        spec, (start, _) = self._specs[name], self._file.places[name]
        return StoredTensor(spec.name, spec.dtype, spec.shape, self.path, start)

    def flush(self) -> None:
        """Flush what was written to disk."""
        self._file.flush()

    def close(self) -> str:
        """Flush to disk after checking that every tensor is complete; returns the sha256."""
        return self._file.close()

    def abandon(self) -> None:
        """Close without checks, after a failure."""
        self._file.abandon()


def _layout(specs: Iterable[TensorSpec]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The file's header, each tensor's offset after it, and the bytes of all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, offset = {}, 0
    for spec in specs:
        places[spec.name] = (offset, offset + spec.size_bytes)
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": places[spec.name],
        }
        offset += spec.size_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw, places, offset


def file_bytes(specs: Iterable[TensorSpec]) -> int:
    """Size of the file that holds these tensors, its header included."""
    head, _, size = _layout(specs)
    return len(head) + size


def write_whole(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a small file of its own, atomically."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)
    specs = [TensorSpec(n, CODES[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    writer = ShardWriter(scratch, specs)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    scratch.replace(path)


def assign_to_shards(
    specs: Iterable[TensorSpec], max_shard_bytes: int
) -> dict[str, list[TensorSpec]]:
    """Distribute tensors, in order, over files named as Hugging Face names them."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.size_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.size_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    n = len(shards)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": part for i, part in enumerate(shards, 1)}


def index_of(shards: Mapping[str, list[TensorSpec]]) -> dict[str, Any]:
    """The contents of `model.safetensors.index.json`."""
    return {
        "metadata": {"total_size": sum(s.size_bytes for part in shards.values() for s in part)},
        "weight_map": {s.name: file for file, part in shards.items() for s in part},
    }
