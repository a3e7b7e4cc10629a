"""Safetensors files: tensors read one by one, files written in a stream.

The library's own reader maps files into memory and its writer wants all tensors of a file at
once. Here a tensor is read into memory we own (so it can be pinned and freed), and a file's
layout is fixed before the first tensor exists: the header goes first, then every tensor to its
place in any order and from any thread.
"""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quantkit.model.headers import StoredTensor as StoredTensor
from quantkit.model.headers import TensorSpec as TensorSpec
from quantkit.model.headers import read_header as read_header

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
FOLLOW_BYTES = 8 << 20
FLUSH_BYTES = 256 << 20


def to_host(tensor: torch.Tensor, wait: bool = True) -> torch.Tensor:
    """A contiguous copy in host memory; from a GPU through pinned memory, several times as fast.

    Without `wait` a copy from a GPU is only begun: an event of its stream tells when it is there.
    """
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=not wait)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


class ShardWriter:
    """One safetensors file whose tensors arrive in any order.

    A thread follows the part that is complete from the start, hashes it and sends it to the disk
    while the rest is still being made, so that closing the file has little left to do.
    """

    def __init__(
        self, path: Path, specs: Iterable[TensorSpec], present: Container[str] = ()
    ) -> None:
        """`present` names tensors that an earlier writer of the same file put there already."""
        self.path = path
        self._specs = {spec.name: spec for spec in specs}
        self._written = {n: s.size_bytes if n in present else 0 for n, s in self._specs.items()}
        self._changed = threading.Condition()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in self._specs.values():
            end = offset + spec.size_bytes
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._starts = {
            name: 8 + len(raw) + entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        }
        resumed = any(self._written.values())
        self._file = os.open(path, os.O_RDWR | (0 if resumed else os.O_CREAT | os.O_EXCL), 0o644)
        self._ends = {
            name: start + self._specs[name].size_bytes for name, start in self._starts.items()
        }
        self._size = 8 + len(raw) + offset
        self._abandoned = False
        self._failure: OSError | None = None
        self._digest = hashlib.sha256()
        self._follower = threading.Thread(target=self._follow, daemon=True)
        try:
            # Claims the space, so that a disk that is too small says so before the work.
            os.posix_fallocate(self._file, 0, self._size)
            self._put(len(raw).to_bytes(8, "little") + raw, 0)
        except BaseException:
            os.close(self._file)
            raise
        self._data_start = 8 + len(raw)
        self._follower.start()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a whole tensor into its place."""
        spec = self._specs[name]
        assert tensor.dtype == DTYPES[spec.dtype], f"{name}: {tensor.dtype} is not {spec.dtype}"
        assert tuple(tensor.shape) == spec.shape, f"{name}: {tensor.shape} is not {spec.shape}"
        self.write_bytes(name, as_bytes(to_host(tensor)))

    def write_bytes(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Put a part of a tensor into its place."""
        self._put(buffer, self._starts[name] + offset)
        with self._changed:
            self._written[name] += len(buffer)
            self._changed.notify()

    def stored(self, name: str) -> StoredTensor:
        """Where a tensor lies, for reading it back before the file is closed."""
        spec = self._specs[name]
        return StoredTensor(spec.name, spec.dtype, spec.shape, self.path, self._starts[name])

    def flush(self) -> None:
        """Send what was written to the disk."""
        os.fdatasync(self._file)

    def close(self) -> str:
        """Flush to disk, after checking that every tensor arrived in full; returns the sha256."""
        missing = [n for n, size in self._written.items() if size != self._specs[n].size_bytes]
        if missing:
            self.abandon()
            raise AssertionError(f"{self.path}: not written in full: {missing[:5]}")
        self._follower.join()
        try:
            if self._failure is not None:
                raise self._failure
            os.fsync(self._file)
        finally:
            os.close(self._file)
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close without checking, when the work failed."""
        with self._changed:
            self._abandoned = True
            self._changed.notify()
        self._follower.join()
        os.close(self._file)

    def _follow(self) -> None:
        try:
            self._hash_as_it_grows()
        except OSError as error:
            self._failure = error

    def _hash_as_it_grows(self) -> None:
        done, flushed = 0, 0
        names = iter(self._specs)
        complete, name = self._data_start, next(names, None)
        while done < self._size:
            with self._changed:
                while name is not None and self._written[name] == self._specs[name].size_bytes:
                    complete, name = self._ends[name], next(names, None)
                if self._abandoned:
                    return
                if complete - done < FOLLOW_BYTES and complete < self._size:
                    self._changed.wait()
                    continue
            part = os.pread(self._file, min(FOLLOW_BYTES, complete - done), done)
            if not part:
                raise OSError(errno.EIO, f"{self.path} ended while it was written")
            self._digest.update(part)
            done += len(part)
            if done - flushed >= FLUSH_BYTES:
                os.fdatasync(self._file)
                flushed = done

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], offset + done)


def write_whole(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A small file of its own, which appears whole or not at all."""
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
    """Divide tensors, in order, over files named the way Hugging Face names them."""
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
