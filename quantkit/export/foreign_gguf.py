"""Another tool's GGUF file, paired with the model it was made from.

The file has its own names, its own row order and its own tokenizer, but no config that transformers
reads. So the model describes it: every tensor of the file is read as the parameter it represents,
and both descriptions of the model must agree.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import CheckpointError
from quantkit.export.foreign import ForeignCheckpoint
from quantkit.export.manifest import is_checkpoint
from quantkit.formats.declared import Declared, Part, Weights
from quantkit.model.source import ModelSource, hub_file
from quantkit.model.tokenizer import load as load_tokenizer

if TYPE_CHECKING:
    from quantkit.gguf.reader import GGUF

SUFFIX = ".gguf"
MOST_UNLIKE = 0.01
"""Share of a vocabulary: converters rename unused tokens and spell spaces differently."""


def file_of(name: str | Path) -> Path | None:
    """The GGUF file that a name refers to: a file, its folder or `org/repo:Q4_K_M`, without
    quantkit's manifest. None if there is none, or more than one.
    """
    path = hub_file(str(name)) or Path(name)
    if path.suffix.lower() == SUFFIX and path.is_file():
        return None if is_checkpoint(path.parent) else path
    if not path.is_dir() or is_checkpoint(path) or (path / "config.json").is_file():
        return None
    files = [one for one in path.glob(f"*{SUFFIX}") if not one.name.startswith("mmproj")]
    return files[0] if len(files) == 1 else None


@dataclass(frozen=True)
class ForeignGGUF(ForeignCheckpoint):
    """Its tensors under the model's names, dequantised when read."""

    gguf: "GGUF | None" = None
    kinds: "Mapping[str, str] | None" = None
    """The ggml type of each quantised layer."""

    @classmethod
    def open(cls, path: Path, original: ModelSource) -> "ForeignGGUF":  # type: ignore[override]
        """A file and the model it was made from; refused if they do not match."""
        from quantkit.gguf import source as files
        from quantkit.gguf.layout import Layout
        from quantkit.gguf.reader import read_file
        from quantkit.gguf.requantize import FileLayout

        file = FileLayout.of(read_file(path), requantize=True).file
        layout = Layout.of(original)
        if faults := [*files.differences(file, layout), *_other_tokens(file, original)]:
            raise CheckpointError(
                f"{path} was not made from {original.label}: {faults[0]}; give the model that it "
                "was made from"
            )
        dtypes = {name: spec.dtype for name, spec in original.tensors.items()}
        kinds = {
            part.removesuffix(".weight"): file.tensors[known.name].kind.name
            for known in layout.tensors
            if known.module is not None and known.name in file.tensors
            for part in known.parts
        }
        return cls(
            str(path), original.folder, None, original.config,
            files.parameters(file, layout, dtypes), original.trust_remote_code, False, "gguf",
            files.stored(file), original, file, kinds,
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
    """The identity of a file."""
    from quantkit.gguf.requantize import FileLayout

    return FileLayout(file).fingerprint


def declared_of(file: "GGUF") -> Declared:
    """What a file says about itself: its types, and its maker."""
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


def _other_tokens(file: "GGUF", original: ModelSource) -> Iterator[str]:
    """Tokens whose id in the file differs from that in the model's own tokenizer."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        yield "it has no vocabulary"
        return
    own = load_tokenizer(original.folder, original.trust_remote_code).get_vocab()
    unlike = [text for text, n in own.items() if n >= len(tokens) or tokens[n] != text]
    if len(unlike) > MOST_UNLIKE * len(own):
        yield f"{len(unlike):,} of {len(own):,} tokens differ, such as {unlike[0]!r}"
