"""A GGUF file as the source of another: any architecture, as long as its numbers are plain floats.

Names, order and metadata are kept; only types change.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gguf
import torch
from gguf import Keys

from quantkit import __version__
from quantkit.errors import SourceError
from quantkit.gguf.mixture import FILE_TYPES
from quantkit.gguf.reader import ALIGNMENT_KEY, GGUF
from quantkit.gguf.tensors import GGUFTensor
from quantkit.gguf.values import FLOATS
from quantkit.gguf.writer import Value

SAMPLED_BYTES = 64 << 10


@dataclass(frozen=True)
class FileLayout:
    """The tensors of a file, kept as they are."""

    file: GGUF

    @classmethod
    def of(cls, file: GGUF, requantize: bool = False) -> "FileLayout":
        """Refuse a file that is already quantised, unless `requantize` is set."""
        if Keys.General.ARCHITECTURE not in file.metadata:
            raise SourceError(f"{file.path} is not a model: it has no {Keys.General.ARCHITECTURE}")
        if int(str(file.metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 1))) > 1:
            raise SourceError(
                f"{file.path} is one part of several; merge them with llama.cpp first"
            )
        rounded = [e for e in file.tensors.values() if e.kind not in FLOATS]
        if rounded and not requantize:
            raise SourceError(
                f"{file.path} is already quantised ({rounded[0].name} is {rounded[0].kind.name}), "
                "and errors would add up; give an F32, F16 or BF16 file, or --requantize"
            )
        return cls(file)

    @property
    def architecture(self) -> str:
        return str(self.file.metadata[Keys.General.ARCHITECTURE])

    @cached_property
    def tensors(self) -> list[GGUFTensor]:
        return [
            GGUFTensor(
                entry.name,
                entry.shape,
                (entry.name,),
                module=entry.name.removesuffix(".weight") if len(entry.shape) > 1 else None,
            )
            for entry in self.file.tensors.values()
        ]

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.file.metadata)

    def described(self, file_type: str) -> dict[str, Value]:
        """The new file's metadata: the same except for how the weights are stored."""
        kept = {key: self.file.stored(key) for key in self.file.metadata if key != ALIGNMENT_KEY}
        return kept | {
            Keys.General.FILE_TYPE: FILE_TYPES[file_type],
            Keys.General.QUANTIZATION_VERSION: gguf.GGML_QUANT_VERSION,
            Keys.General.QUANTIZED_BY: f"quantkit {__version__}",
        }

    def build(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """A tensor's numbers."""
        return self.file.dequantized(name).to(device)

    @property
    def usual_type(self) -> str:
        """The type of most weights."""
        sizes: Counter[str] = Counter()
        for entry in self.file.tensors.values():
            sizes[entry.kind.name] += math.prod(entry.shape)
        return sizes.most_common(1)[0][0]

    @property
    def size_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.file.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the metadata, the tensor table and the beginning and end of every tensor."""
        digest = hashlib.sha256(repr(sorted(self.file.metadata.items())).encode())
        with self.file.path.open("rb") as stream:
            for entry in self.file.tensors.values():
                digest.update(f"{entry.name} {entry.kind.name} {entry.shape}".encode())
                size = min(SAMPLED_BYTES, entry.n_bytes)
                for offset in (entry.offset, entry.offset + entry.n_bytes - size):
                    stream.seek(offset)
                    digest.update(stream.read(size))
        return digest.hexdigest()
