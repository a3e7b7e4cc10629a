"""Strict GGUF reader: every length is checked against the file before it is trusted.

The `gguf` package maps a file and follows whatever its header says; a damaged file then ends in an
IndexError, in wrong tensors or in an allocation of any size. Here a file is either read correctly
or refused with one sentence.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NoReturn

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from quantkit.errors import CheckpointError
from quantkit.gguf.values import FLOATS, KINDS, dequantize
from quantkit.model.shards import StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 3 differs only in allowing the other byte order
ALIGNMENT_KEY = "general.alignment"
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 63  # of a tensor's name; llama.cpp refuses longer ones
MAX_KEY_BYTES = (1 << 16) - 1
MAX_HEADER_BYTES = 1 << 28  # the largest vocabularies take a few dozen MiB
CHUNK_VALUES = 1 << 24

NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "<u1",
}

Scalar = str | int | float | bool
Value = Scalar | list[Scalar]


@dataclass(frozen=True)
class Entry:
    """One tensor and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    """In torch's order: rows before columns, the reverse of the file's."""
    kind: GGMLQuantizationType
    offset: int
    """Counted from the beginning of the file."""
    n_bytes: int

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.kind, self.columns)


@dataclass(frozen=True)
class GGUF:
    """A file with a valid header whose tensors lie within the file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Entry]
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Where each key's type and value are in the file."""

    def stored(self, key: str) -> bytes:
        """A value exactly as the file stores it, type included, to copy it into another file."""
        start, stop = self.spans[key]
        with self.path.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)

    def read(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, uint8 [rows, row bytes]; leading dimensions count as rows."""
        entry = self._entry(name)
        shape = (entry.n_bytes // entry.row_bytes, entry.row_bytes)
        return StoredTensor(name, "U8", shape, self.path, entry.offset).read()

    def dequantized(self, name: str, index: int | None = None) -> torch.Tensor:
        """The values of a tensor in float32 and in its own shape; with an index only one entry of
        its first dimension, such as an expert, is read.
        """
        entry = self._entry(name)
        shape, raw = entry.shape, self._raw(entry, index)
        if index is not None:
            shape = shape[1:]
        if entry.kind in FLOATS:
            return dequantize(raw, entry.kind).reshape(shape)
        values = torch.empty(len(raw), entry.columns)
        step = max(1, CHUNK_VALUES // entry.columns)
        try:
            for start in range(0, len(raw), step):
                rows = slice(start, start + step)
                values[rows] = _numbers(raw[rows], entry.kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is of type {entry.kind.name}, which holds no floats"
            ) from error
        return (values * self._outer_scale(name)).reshape(shape)

    def _raw(self, entry: Entry, index: int | None) -> torch.Tensor:
        if index is None:
            return self.read(entry.name)
        n_rows = entry.n_bytes // entry.row_bytes // entry.shape[0]
        start = entry.offset + index * n_rows * entry.row_bytes
        return StoredTensor(entry.name, "U8", (n_rows, entry.row_bytes), self.path, start).read()

    def _outer_scale(self, name: str) -> float:
        """The factor of the layer's output in llama.cpp; only NVFP4 has one."""
        beside = f"{name.removesuffix('weight')}scale"
        if self.tensors[name].kind != GGMLQuantizationType.NVFP4 or beside not in self.tensors:
            return 1.0
        if self.tensors[beside].shape != (1,):
            raise CheckpointError(
                f"{self.path}: {beside} has several scales; only one is supported"
            )
        return self.dequantized(beside).item()

    def _entry(self, name: str) -> Entry:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self.tensors[name]


def row_bytes(kind: GGMLQuantizationType, columns: int) -> int:
    """Bytes per row; a row consists of whole blocks."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return columns // block * size


def read_file(path: Path) -> GGUF:
    """Read a file's header and check that it describes the file's contents."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            return _Header(path, stream, size).parse()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


def _numbers(raw: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Rows of bytes as float32; types that quantkit never writes are left to the gguf package."""
    if kind in KINDS:
        return dequantize(raw, kind)
    with np.errstate(all="ignore"):  # a damaged scale may overflow; that shows in the values
        return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind))


class _Header:
    """A cursor over the header that never reads past the end of the file."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self._path = path
        self._stream = stream
        self._size = size
        self._at = 0

    def parse(self) -> GGUF:
        self._preamble()
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        # The smallest possible key or tensor: an empty name, its type and nothing else.
        if n_keys * 13 + n_tensors * 24 > self._left():
            self._refuse(f"it claims {n_keys} keys and {n_tensors} tensors")
        metadata: dict[str, Value] = {}
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(n_keys):
            key = self._text("a key", MAX_KEY_BYTES)
            if key in metadata:
                self._refuse(f"key {key!r} occurs twice")
            start = self._at
            metadata[key] = self._value(key)
            spans[key] = (start, self._at)
        alignment = self._alignment(metadata)
        infos = [self._info() for _ in range(n_tensors)]
        base = self._at + -self._at % alignment
        tensors: dict[str, Entry] = {}
        for info in infos:
            if info.name in tensors:
                self._refuse(f"tensor {info.name!r} occurs twice")
            tensors[info.name] = self._placed(info, base, alignment)
        self._check_overlap(tensors)
        return GGUF(self._path, metadata, tensors, spans)

    def _preamble(self) -> None:
        if self._take(4, "its magic") != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version and version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self._path} is a big-endian GGUF file; convert it to little-endian first"
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF version {version}; quantkit reads versions 2 and 3"
            )

    def _value(self, key: str) -> Value:
        kind = self._value_type(key)
        if kind != GGUFValueType.ARRAY:
            return self._values(key, kind, 1)[0]
        kind = self._value_type(key)
        if kind == GGUFValueType.ARRAY:
            self._refuse(f"key {key!r} has nested arrays")
        return self._values(key, kind, self._number("Q"))

    def _value_type(self, key: str) -> GGUFValueType:
        number = self._number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            self._refuse(f"key {key!r} has the unknown type {number}")

    def _values(self, key: str, kind: GGUFValueType, n: int) -> list[Scalar]:
        if kind == GGUFValueType.STRING:
            if n * 8 > self._left():
                self._refuse(f"key {key!r} claims {n} texts")
            return [self._text(f"key {key!r}") for _ in range(n)]
        numbers = np.dtype(NUMBERS[kind])
        raw = self._take(n * numbers.itemsize, f"key {key!r}")
        values: list[Scalar] = np.frombuffer(raw, numbers).tolist()
        if kind == GGUFValueType.BOOL:
            if any(value not in (0, 1) for value in values):
                self._refuse(f"key {key!r} has a boolean other than 0 and 1")
            return [bool(value) for value in values]
        return values

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get(ALIGNMENT_KEY, gguf.GGUF_DEFAULT_ALIGNMENT)
        # To Python a bool is an int; as an alignment it makes no sense.
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"its alignment {alignment!r:.40} is not a power of two")
        return alignment

    def _info(self) -> Entry:
        """A tensor as the header describes it; its offset is still relative to the data's start."""
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        n_dimensions = self._number("I")
        if n_dimensions > MAX_DIMENSIONS:
            self._refuse(f"tensor {name!r} has {n_dimensions} dimensions; the format allows 4")
        shape = tuple(self._number("Q") for _ in range(n_dimensions))[::-1]
        number = self._number("I")
        offset = self._number("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            self._refuse(f"tensor {name!r} has the unknown type {number}")
        if 0 in shape:
            self._refuse(f"tensor {name!r} has shape {list(shape)} and thus no values")
        entry = Entry(name, shape, kind, offset, 0)
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if entry.columns % block:
            self._refuse(
                f"tensor {name!r} has {entry.columns} columns, which {kind.name} cannot divide "
                f"into blocks of {block}"
            )
        n_bytes = math.prod(shape[:-1]) * entry.row_bytes
        if n_bytes > self._size:
            self._refuse(f"tensor {name!r} of shape {list(shape)} takes more than the whole file")
        return Entry(name, shape, kind, offset, n_bytes)

    def _placed(self, info: Entry, base: int, alignment: int) -> Entry:
        if info.offset % alignment:
            self._refuse(f"tensor {info.name!r} does not begin at a multiple of {alignment}")
        start = base + info.offset
        if start + info.n_bytes > self._size:
            self._refuse(
                f"tensor {info.name!r} ends at byte {start + info.n_bytes} of {self._size}"
            )
        return Entry(info.name, info.shape, info.kind, start, info.n_bytes)

    def _check_overlap(self, tensors: Mapping[str, Entry]) -> None:
        last: Entry | None = None
        for entry in sorted(tensors.values(), key=lambda e: e.offset):
            if last and entry.offset < last.offset + last.n_bytes:
                self._refuse(f"tensors {last.name!r} and {entry.name!r} overlap")
            last = entry

    def _text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > most:
            self._refuse(f"{what} is {length} bytes long, more than {most}")
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8 text")

    def _number(self, code: str) -> int:
        return struct.unpack("<" + code, self._take(struct.calcsize(code), "its header"))[0]

    def _take(self, n: int, what: str) -> bytes:
        if n > self._left():
            self._refuse(f"{what} takes {n} bytes where {self._left()} are left")
        raw = self._stream.read(n)
        if len(raw) < n:
            self._refuse("it became shorter while being read")
        self._at += n
        return raw

    def _left(self) -> int:
        return min(self._size, MAX_HEADER_BYTES) - self._at

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(
            f"{self._path} is truncated or damaged: {reason:.200}; copy or download it again"
        )
