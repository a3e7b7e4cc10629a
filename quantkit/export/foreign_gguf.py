"""A GGUF file that others made, beside the model that it was made from.

The file has its own names, its own order of rows and a tokenizer of its own, but no config that
transformers reads. So the model is what describes it: every tensor of the file is read as the
parameter that it stands for, and what both tell of the model must agree.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError
from quantkit.export.foreign import ForeignCheckpoint
from quantkit.export.manifest import is_checkpoint
from quantkit.formats.declared import Declared, Part, Weights
from quantkit.model.derived import DerivedTensor
from quantkit.model.headers import StoredTensor
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from quantkit.gguf.layout import Layout
    from quantkit.gguf.reader import GGUF, Entry

SUFFIX = ".gguf"
BESIDE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that follow from the config."""
MOST_UNLIKE = 0.01
"""Of a vocabulary: converters rename unused tokens and spell spaces otherwise."""


def file_of(name: str | Path) -> Path | None:
    """The GGUF file that a name means, itself or its folder, where no manifest of ours describes
    it; None: there is none, or more than one."""
    path = Path(name)
    if path.suffix.lower() == SUFFIX and path.is_file():
        return None if is_checkpoint(path.parent) else path
    if not path.is_dir() or is_checkpoint(path) or (path / "config.json").is_file():
        return None
    files = [one for one in path.glob(f"*{SUFFIX}") if not one.name.startswith("mmproj")]
    return files[0] if len(files) == 1 else None


@dataclass(frozen=True)
class ForeignGGUF(ForeignCheckpoint):
    """Its tensors by the model's names, dequantised as they are read."""

    gguf: "GGUF | None" = None
    kinds: "Mapping[str, str] | None" = None
    """The type of ggml that each quantised layer is stored in."""

    @classmethod
    def open(cls, path: Path, original: ModelSource) -> "ForeignGGUF":  # type: ignore[override]
        """A file beside the model that it was made from; refused where they do not fit."""
        from quantkit.gguf.layout import Layout
        from quantkit.gguf.reader import read_file
        from quantkit.gguf.requantize import FileLayout

        file = FileLayout.of(read_file(path), requantize=True).file
        layout = Layout.of(original)
        if faults := list(_differences(file, layout, original)):
            raise CheckpointError(
                f"{path} was not made from {original.label}: {faults[0]}; give the model that it "
                "was made from"
            )
        tensors: dict[str, StoredTensor] = {}
        kinds: dict[str, str] = {}
        for known in layout.tensors:
            entry = file.tensors.get(known.name)
            if entry is None or not known.parts:
                continue
            parent = _stored(file, entry)
            for part in known.parts:
                spec = original.tensors[part]
                compute = partial(_restored, file, layout, known.name, part)
                tensors[part] = DerivedTensor.of(part, spec.dtype, spec.shape, [parent], compute)
                if known.module is not None:
                    kinds[part.removesuffix(".weight")] = entry.kind.name
        return cls(
            str(path), original.folder, None, original.config, tensors,
            original.trust_remote_code, False, "gguf",
            {name: _stored(file, entry) for name, entry in file.tensors.items()}, original, file,
            kinds,
        )  # fmt: skip

    @property
    def label(self) -> str:
        return Path(self.name).stem

    @property
    def file(self) -> "GGUF":
        assert self.gguf is not None
        return self.gguf

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the file alone, whatever it is compared with."""
        return digest_of(self.file)

    @cached_property
    def declared(self) -> Declared:
        return declared_of(self.file)

    @property
    def config_digest(self) -> str:
        return self.fingerprint

    @cached_property
    def layers(self) -> list[str]:
        return list(self.kinds or {})

    def part(self, module: str) -> Part:
        return _part((self.kinds or {})[module])


def digest_of(file: "GGUF") -> str:
    """What identifies a file."""
    from quantkit.gguf.requantize import FileLayout

    return FileLayout(file).fingerprint


def declared_of(file: "GGUF") -> Declared:
    """What a file says of itself: its types, and who made it."""
    from quantkit.gguf.values import FLOATS

    sizes: dict[str, int] = {}
    for entry in file.tensors.values():
        if entry.kind not in FLOATS:
            sizes[entry.kind.name] = sizes.get(entry.kind.name, 0) + math.prod(entry.shape)
    usual = sorted(sizes, key=lambda kind: -sizes[kind]) or ["BF16"]
    maker = file.metadata.get("general.quantized_by")
    return Declared("gguf", tuple(map(_part, usual)), (), str(maker) if maker else None)


def _part(kind: str) -> Part:
    from quantkit.gguf.names import GGML_QUANT_SIZES, GGMLQuantizationType

    size, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return Part(("Linear",), Weights(8 * n_bytes // size, "int", "group", size, kind=kind))


def _stored(file: "GGUF", entry: "Entry") -> StoredTensor:
    """The bytes of a tensor as they lie."""
    shape = (entry.n_bytes // entry.row_bytes, entry.row_bytes)
    return StoredTensor(entry.name, "U8", shape, file.path, entry.offset)


def _restored(
    file: "GGUF", layout: "Layout", name: str, part: str, parents: "Sequence[torch.Tensor]"
) -> "torch.Tensor":
    """One parameter of those that a tensor of the file stands for."""
    return layout.restore(name, file.dequantized(name))[part]


def _differences(file: "GGUF", layout: "Layout", original: ModelSource) -> Iterator[str]:
    """What the file and the model tell of the model otherwise than each other."""
    architecture = file.metadata["general.architecture"]
    if architecture != layout.architecture:
        yield f"its architecture is {architecture}, that of the model is {layout.architecture}"
        return
    for key, value in layout.metadata.items():
        if key.endswith(("vocab_size", "context_length")) or key not in file.metadata:
            continue  # padded, or cut, by whoever converted it
        if not _same(value, found := file.metadata[key]):
            yield f"{key} is {found!r}, the model's config makes it {value!r}"
    for known in layout.tensors:
        entry = file.tensors.get(known.name)
        if entry is None and known.parts:
            yield f"it lacks {known.name}"
        elif entry is not None and known.parts and entry.shape != known.shape:
            yield f"{known.name} is {list(entry.shape)}, the model makes it {list(known.shape)}"
    scales = {f"{name.removesuffix('weight')}scale" for name in layout.by_name}
    if extra := [n for n in file.tensors if n not in {*layout.by_name, *BESIDE, *scales}]:
        yield f"it holds {extra[0]}, of which the model has nothing"
    yield from _other_tokens(file, original)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


def _other_tokens(file: "GGUF", original: ModelSource) -> Iterator[str]:
    """Tokens that have another number in the file than in the model's own tokenizer."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        yield "it has no vocabulary"
        return
    own = load_tokenizer(original.folder, original.trust_remote_code).get_vocab()
    unlike = [text for text, n in own.items() if n >= len(tokens) or tokens[n] != text]
    if len(unlike) > MOST_UNLIKE * len(own):
        yield f"{len(unlike):,} of {len(own):,} tokens are others, such as {unlike[0]!r}"
