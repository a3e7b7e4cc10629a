"""A GGUF file as a model: config, tokenizer and tensors under transformers' names.

The config is derived from the file's keys, and the keys are derived from that config again: where
both agree, the config says what the file says. Tensors are dequantised one by one as they are read,
and an expert without the others of its block. Config and tokenizer live in a temporary folder that
is deleted with the last reference to the model.
"""

import math
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from gguf import Keys

from quantkit.errors import SourceError
from quantkit.gguf import to_tokenizer
from quantkit.gguf.layout import Change, Layout
from quantkit.gguf.reader import GGUF, Entry, read_file
from quantkit.gguf.requantize import FileLayout
from quantkit.gguf.tensors import GGUFTensor
from quantkit.gguf.to_config import config_of
from quantkit.gguf.values import FLOATS
from quantkit.model.derived import DerivedTensor
from quantkit.model.description import README
from quantkit.model.headers import StoredTensor
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.storage import write_json, write_text

SUFFIX = ".gguf"
TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
BESIDE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that follow from the config."""
UNSAID = ("vocab_size", "context_length", "rope.scaling.finetuned", "rope.scaling.type")
"""Keys that may differ: padded or cut by whoever converted the file, or without effect."""


class Folder:
    """A temporary folder that is deleted with the last reference to it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="quantkit-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class GGUFSource(ModelSource):
    """A file whose tensors are read as the model parameters they stand for."""

    gguf: GGUF | None = None
    held: Folder | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the file alone: everything derived from its keys follows from it."""
        assert self.gguf is not None
        return FileLayout(self.gguf).fingerprint

    @property
    def place(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        return Path(self.name).stem


def is_file(name: str | Path) -> bool:
    """Whether a name denotes a local GGUF file."""
    return str(name).lower().endswith(SUFFIX) and Path(name).is_file()


def open_model(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cached_only: bool = False,
    requantize: bool = False,
) -> ModelSource:
    """`ModelSource.open`, for GGUF files too."""
    if is_file(name):
        return open_file(Path(name), requantize)
    return ModelSource.open(name, revision, trust_remote_code, cached_only, requantize)


def open_file(path: Path, requantize: bool = False, dtype: str | None = None) -> GGUFSource:
    """Open a file as a model in `dtype`, such as BF16; by default in its own dtype, or BF16.

    A quantised file is refused unless `requantize` is set.
    """
    file = FileLayout.of(read_file(path), requantize).file
    held = Folder()
    dtype = dtype or usual_dtype(file)
    config = config_of(file, TYPES[dtype])
    write_json(held.path / "config.json", config)
    to_tokenizer.write(file, held.path)
    write_text(held.path / README, _card(file))
    layout = Layout.of_folder(held.path)
    faults = [*differences(file, layout), *_unlike_factors(file, layout), *_unknown(file, layout)]
    if faults:
        raise SourceError(
            f"{path}: cannot be written as a model folder: {faults[0]}; give the model that it was "
            "made from"
        )
    load_tokenizer(held.path)
    tensors = parameters(file, layout, {}, dtype)
    by = None if set(kinds_of(file)) <= {kind.name for kind in FLOATS} else words_of(file)
    return GGUFSource(
        str(path.resolve()), held.path, None, config, tensors, False, True, by, stored(file),
        file, held,
    )  # fmt: skip


def kinds_of(file: GGUF) -> list[str]:
    """Types of a file's weights, the most frequent first."""
    sizes: Counter[str] = Counter()
    for entry in file.tensors.values():
        if len(entry.shape) > 1:
            sizes[entry.kind.name] += math.prod(entry.shape)
    return [kind for kind, _ in sizes.most_common()]


def words_of(file: GGUF) -> str:
    """What a file was quantised to, and by whom if it says so."""
    rounded = [kind for kind in kinds_of(file) if kind not in TYPES]
    maker = file.metadata.get(Keys.General.QUANTIZED_BY)
    return f"GGUF ({', '.join(rounded)})" + (f" of {maker}" if isinstance(maker, str) else "")


def usual_dtype(file: GGUF) -> str:
    """The dtype that loses nothing of a file in plain floats; BF16 for others."""
    most = kinds_of(file)[:1]
    return most[0] if most and most[0] in TYPES else "BF16"


def stored(file: GGUF) -> dict[str, StoredTensor]:
    """The bytes of every tensor as stored."""
    return {name: _bytes_of(file, entry) for name, entry in file.tensors.items()}


def _bytes_of(file: GGUF, entry: Entry) -> StoredTensor:
    shape = (entry.n_bytes // entry.row_bytes, entry.row_bytes)
    return StoredTensor(entry.name, "U8", shape, file.path, entry.offset)


def parameters(
    file: GGUF, layout: Layout, dtypes: Mapping[str, str], usual: str = "BF16"
) -> dict[str, StoredTensor]:
    """The model's own tensors in the given dtypes, each dequantised when it is read."""
    found: dict[str, StoredTensor] = {}
    for known in layout.tensors:
        entry = file.tensors.get(known.name)
        if entry is None:
            continue
        for index, part in enumerate(known.parts):
            stacked = known.change is Change.STACK
            place = _Lazy(known.name, "U8", (), file.path, entry.offset)
            compute = partial(_read, file, layout, known, index if stacked else None)
            shape = known.shape[1:] if stacked else known.shape
            dtype = dtypes.get(part, usual)
            found[part] = DerivedTensor.of(part, dtype, shape, [place], compute)
    return found


class _Lazy(StoredTensor):
    """Where a tensor is stored; whoever dequantises it reads it, in part or as a whole."""

    def read(self, pinned: bool = False) -> torch.Tensor:
        return torch.empty(0)


def _read(
    file: GGUF,
    layout: Layout,
    tensor: GGUFTensor,
    index: int | None,
    parents: Sequence[torch.Tensor],
) -> torch.Tensor:
    return layout.restore_one(tensor, file.dequantized(tensor.name, index))


def differences(file: GGUF, layout: Layout) -> Iterator[str]:
    """What a file and a model state differently."""
    architecture = file.metadata[Keys.General.ARCHITECTURE]
    if architecture != layout.architecture:
        yield f"its architecture is {architecture}, that of the model is {layout.architecture}"
        return
    for key, value in layout.metadata.items():
        if key.endswith(("vocab_size", "context_length")) or key not in file.metadata:
            continue  # padded, or cut, by whoever converted it
        if not _same(value, found := file.metadata[key]):
            yield f"{key} is {found!r}, the model's config gives {value!r}"
    for known in layout.tensors:
        entry = file.tensors.get(known.name)
        if entry is None and known.parts:
            yield f"it lacks {known.name}"
        elif entry is not None and known.parts and entry.shape != known.shape:
            yield f"{known.name} is {list(entry.shape)}, the model has {list(known.shape)}"
    scales = {f"{name.removesuffix('weight')}scale" for name in layout.by_name}
    if extra := [n for n in file.tensors if n not in {*layout.by_name, *BESIDE, *scales}]:
        yield f"it has {extra[0]}, which the model does not have"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


def _unlike_factors(file: GGUF, layout: Layout) -> Iterator[str]:
    """Factors of rotary frequencies that do not follow from the config."""
    for name in BESIDE:
        if (name in file.tensors) != (name in layout.by_name):
            yield f"{name} does not follow from any setting"
        elif name in file.tensors:
            ours, theirs = layout.build(name), file.dequantized(name)
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4):
                yield f"{name} does not follow from any setting"


def _unknown(file: GGUF, layout: Layout) -> Iterator[str]:
    """Keys of the architecture for which the config has no setting."""
    for key, value in file.metadata.items():
        family, _, rest = key.partition(".")
        if family == layout.architecture and key not in layout.metadata and rest not in UNSAID:
            yield f"{key} is {value!r:.60}, which quantkit cannot express as a setting"


def _card(file: GGUF) -> str:
    """A README that names the original model and the licence stated in the file."""
    values, lines = file.metadata, ["---"]
    for name, key in (
        ("license", Keys.General.LICENSE),
        ("license_name", Keys.General.LICENSE_NAME),
        ("license_link", Keys.General.LICENSE_LINK),
    ):
        if isinstance(found := values.get(key), str):
            lines.append(f"{name}: {found!r}")
    bases = [values.get(Keys.General.BASE_MODEL_REPO_URL.format(id=0))]
    hub = "https://huggingface.co/"
    ids = [b.removeprefix(hub) for b in bases if isinstance(b, str) and b.startswith(hub)]
    if ids:
        lines.append(f"base_model: {ids[0]!r}")
    title = str(values.get(Keys.General.NAME) or file.path.stem)
    from_what = words_of(file) if kinds_of(file)[:1] != [usual_dtype(file)] else "GGUF"
    return "\n".join(
        [
            *lines,
            "---",
            f"# {' '.join(title.split())[:200]}",
            "",
            f"Made by quantkit from `{file.path.name}`, {from_what}: its values are the file's "
            "blocks dequantised, not those of the model before it was quantised.",
            "",
        ]
    )
