"""A GGUF file whose tensors arrive in any order.

Names, types and shapes of all tensors are known before the first of them exists, so every tensor's
bytes are written straight to their place, in parts and from any thread if need be. Nothing is
buffered.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from gguf import GGUF_MAGIC, GGUF_VERSION, GGMLQuantizationType, GGUFValueType

from quantkit.gguf.tensors import size_bytes as size_bytes
from quantkit.model.file_writer import FileWriter
from quantkit.model.shards import as_bytes, to_host

ALIGNMENT = 32

Scalar = bool | int | float | str
Value = Scalar | bytes | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]
"""Bytes are a value copied from another file, type included."""

PACKING = {
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f",
}


class GGUFFile:
    """A file being written; it appears under `path` at once, so pass a scratch name."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Value],
        tensors: Iterable[tuple[str, Sequence[int], GGMLQuantizationType]],
    ) -> None:
        head, places, size = _layout(metadata, tensors)
        self._file = FileWriter(path, head, places, size)

    def write(
        self, name: str, data: torch.Tensor | bytes | bytearray | memoryview, offset: int = 0
    ) -> None:
        """Write bytes of a tensor, starting at its byte `offset`."""
        raw = as_bytes(to_host(data)) if isinstance(data, torch.Tensor) else data
        self._file.write(name, raw, offset)

    def close(self) -> str:
        """Flush to disk after checking that every tensor is complete; returns the sha256."""
        return self._file.close()

    def abandon(self) -> None:
        """Close without checks, after a failure."""
        self._file.abandon()


Tensors = Iterable[tuple[str, Sequence[int], GGMLQuantizationType]]
"""Names, shapes in torch's order and types."""


def _layout(
    metadata: Mapping[str, Value], tensors: Tensors
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The file's header, each tensor's offset after it, and the bytes of all tensors."""
    places: dict[str, tuple[int, int]] = {}
    table, offset = [], 0
    for name, shape, kind in tensors:
        assert name not in places, f"{name} is in the table twice"
        places[name] = (offset, offset + size_bytes(shape, kind))
        # The fastest dimension comes first in GGUF, and last in torch.
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        table.append(_text(name) + dimensions + struct.pack("<IQ", kind, offset))
        offset = _aligned(places[name][1])
    head = struct.pack("<IIQQ", GGUF_MAGIC, GGUF_VERSION, len(table), len(metadata))
    entries = [_text(key) + _typed(value) for key, value in metadata.items()]
    head += b"".join(entries) + b"".join(table)
    head += bytes(_aligned(len(head)) - len(head))
    return head, places, offset


def file_bytes(metadata: Mapping[str, Value], tensors: Tensors) -> int:
    """Size of the file that holds these tensors, everything else in it included."""
    head, _, size = _layout(metadata, tensors)
    return len(head) + size


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _kind(value: Scalar) -> GGUFValueType:
    """llama.cpp reads counts and ids as uint32, and refuses a key of another type."""
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, str):
        return GGUFValueType.STRING
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    if value < 0:
        return GGUFValueType.INT32 if value >= -(1 << 31) else GGUFValueType.INT64
    return GGUFValueType.UINT32 if value < 1 << 32 else GGUFValueType.UINT64


def _typed(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool | int | float | str):
        return struct.pack("<I", _kind(value)) + _bare(value, _kind(value))
    assert len(value), "an empty array has no type"
    kind = _kind(value[0])
    # Arrays of integers are signed: token types must be int32.
    kind = GGUFValueType.INT32 if kind == GGUFValueType.UINT32 else kind
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(value))
    return head + b"".join(_bare(item, kind) for item in value)


def _bare(value: Scalar, kind: GGUFValueType) -> bytes:
    if isinstance(value, str):
        return _text(value)
    return struct.pack(PACKING[kind], value)
