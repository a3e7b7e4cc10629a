"""Headers of safetensors files, checked strictly: which tensors they hold, and where.

Without torch, so that questions about a model's size are answered at once.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import ShardError
from quantkit.tensorspec import ITEM_BYTES as ITEM_BYTES
from quantkit.tensorspec import TensorSpec as TensorSpec

if TYPE_CHECKING:
    import torch

WEIGHT_TYPES = ("BF16", "F16", "F32")
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor and where its bytes are."""

    file: Path
    start: int

    def read_into(self, buffer: memoryview, offset: int = 0) -> None:
        """Fill `buffer` with this tensor's bytes, starting at `offset`."""
        try:
            descriptor = os.open(self.file, os.O_RDONLY)
        except OSError as error:
            raise ShardError(f"cannot read {self.name} from {self.file}: {error}") from error
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done:]], self.start + offset + done)
                if got == 0:
                    raise ShardError(f"{self.file} ends inside tensor {self.name}: truncated")
                done += got
        except OSError as error:
            raise ShardError(f"cannot read {self.name} from {self.file}: {error}") from error
        finally:
            os.close(descriptor)

    def read(self, pinned: bool = False) -> "torch.Tensor":
        """The whole tensor, in its own memory."""
        import torch

        from quantkit.model.dtypes import DTYPES, as_bytes

        raw = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=pinned)
        if raw.numel():
            self.read_into(as_bytes(raw))
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, after checking that its header describes exactly its bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ShardError(
                    f"{path} is not a safetensors file or is truncated: it has {size} bytes; "
                    "copy or download it again"
                )
            raw = stream.read(length)
    except OSError as error:
        raise ShardError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        header = _parse(raw)
        tensors = {name: _entry(path, name, 8 + length, value) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ShardError(f"{path} has a corrupt header ({error}); copy it again") from error
    end = 8 + length
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.size_bytes)):
        if tensor.start != end:
            raise ShardError(f"{path} has a corrupt header: a gap or overlap at {tensor.name}")
        end += tensor.size_bytes
    if end != size:
        raise ShardError(
            f"{path} is truncated or corrupt: its header describes {end:,} bytes, it has "
            f"{size:,}; copy or download it again"
        )
    return tensors


def _parse(raw: bytes) -> dict[str, Any]:
    """Parse JSON as strictly as the reference implementation does; returns it without metadata."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is not a number here")

    def natural(text: str) -> int:
        return refuse(text) if text.startswith("-") else int(text)

    header = json.loads(
        raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse, parse_int=natural
    )
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(type(v) is str for v in metadata.values()):
        raise ValueError("its metadata must map names to text")
    for name in header:
        name.encode("utf-8")  # lone surrogates are not text
    return header


def _entry(path: Path, name: str, base: int, value: Any) -> StoredTensor:
    dtype, shape, (start, stop) = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} has the unknown type {dtype}")
    if type(shape) is not list or not all(type(n) is int for n in (*shape, start, stop)):
        raise ValueError(f"{name} has an impossible shape or offset")
    for n in range(len(shape) + 1):
        if math.prod(shape[:n]) * ITEM_BYTES[dtype] >= 1 << 63:
            raise ValueError(f"{name} has an impossibly large shape")
    tensor = StoredTensor(name, dtype, tuple(shape), path, base + start)
    if tensor.size_bytes != stop - start:
        raise ValueError(f"{name} has {stop - start} bytes, which does not match its shape")
    return tensor
