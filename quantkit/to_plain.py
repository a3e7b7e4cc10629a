"""Dequantise a model to a plain folder in 16 or 32 bits.

Reads a GGUF file, or a folder in any supported format. Tensors go through memory one at a time. No
precision comes back: what rounding removed is gone. But every tool can read the result, and it can
be quantised to another format.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError, SourceError
from quantkit.export import expert_layout, folder
from quantkit.export.manifest import now, versions
from quantkit.formats import PLAIN
from quantkit.gguf import source as gguf
from quantkit.model import dequantized
from quantkit.model.config import method_of, plain_config
from quantkit.model.derived import DerivedTensor
from quantkit.model.description import README
from quantkit.model.headers import WEIGHT_TYPES, StoredTensor
from quantkit.model.source import ModelSource, check_kind, read_config, read_tensors
from quantkit.onepass.datafree import require_finite
from quantkit.progress import Progress, Silent
from quantkit.storage import (
    DEQUANTIZED,
    refuse_existing,
    require_space,
    scratch_folder,
    write_json,
    write_text,
)


@dataclass(frozen=True)
class Plain:
    """A plain folder that was written."""

    folder: Path
    source: str
    quantized_by: str
    """The source's own statement of its quantiser."""
    fingerprint: str
    dtype: str
    size_bytes: int
    n_tensors: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "quantized_by": self.quantized_by,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "size_bytes": self.size_bytes,
            "n_tensors": self.n_tensors,
            "created": now(),
            "versions": versions(),
        }


def convert(
    path: Path,
    to: str,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Plain:
    """Dequantise a file or folder to the folder `out`, by default a sibling."""
    progress, started = progress or Silent(), time.monotonic()
    dtype = PLAIN[to]
    home = path.resolve()
    out = out or home.with_name(f"{home.stem if home.is_file() else home.name}-{to}")
    if out.resolve() == home:
        raise CheckpointError(f"{out} is the checkpoint itself; name another folder with -o")
    refuse_existing(out, force, DEQUANTIZED)
    source = _opened(path, dtype, trust_remote_code)
    tensors = {name: _typed(tensor, dtype) for name, tensor in source.tensors.items()}
    together = expert_layout.together(list(tensors.values()), source)
    require_space(out, folder.weight_bytes(tensors.values()))
    with scratch_folder(out, force, marker=DEQUANTIZED) as scratch:
        size = sum(tensor.size_bytes for tensor in tensors.values())
        progress.start(f"convert {source.label}", size)
        with folder.open_folder(scratch, tensors.values(), together=together) as writer:
            for tensor in tensors.values():
                values = tensor.read()
                require_finite(tensor, values)
                writer.write(tensor.name, values)
                progress.advance(tensor.size_bytes)
        progress.finish()
        by = source.quantized_by or "GGUF in plain floats"
        seconds = time.monotonic() - started
        made = Plain(out, str(home), by, source.fingerprint, to, size, len(tensors), seconds)
        _write_side_files(source, scratch, dtype)
        write_json(scratch / DEQUANTIZED, made.to_json())
    return made


def _opened(path: Path, dtype: str, trust_remote_code: bool) -> ModelSource:
    if (file := _file_in(path)) is not None:
        return gguf.open_file(file, requantize=True, dtype=dtype)
    given = read_config(path)
    method = method_of(given)
    if method is None:
        raise SourceError(f"{path} is not quantised, so there is nothing to dequantise")
    check_kind(plain_config(given), path, trust_remote_code)
    stored = read_tensors(path)
    found = dequantized.dequantized(stored, given)
    return ModelSource(
        str(path), path, None, plain_config(given), found, trust_remote_code, False, method, stored
    )


def _file_in(path: Path) -> Path | None:
    """The GGUF file meant: the path itself, or the one in the folder."""
    if gguf.is_file(path):
        return path
    if not path.is_dir():
        raise SourceError(f"{path} is neither a folder nor a GGUF file here")
    files = [one for one in path.glob(f"*{gguf.SUFFIX}") if one.name != "imatrix.gguf"]
    if not files or any(path.glob("*.safetensors")):
        return None
    if len(files) > 1:
        raise SourceError(f"{path} holds {len(files)} GGUF files; name one of them")
    return files[0]


def _typed(tensor: StoredTensor, dtype: str) -> StoredTensor:
    """The same in another dtype; tensors other than weights, such as indices, keep theirs."""
    if tensor.dtype not in WEIGHT_TYPES or tensor.dtype == dtype:
        return tensor
    if isinstance(tensor, DerivedTensor):  # computed in float32, and rounded once
        return replace(tensor, dtype=dtype)
    return DerivedTensor.of(tensor.name, dtype, tensor.shape, [tensor], lambda parts: parts[0])


def _write_side_files(source: ModelSource, scratch: Path, dtype: str) -> None:
    folder.copy_side_files(scratch, source, but=folder.OWN_FILES)
    config = {"torch_dtype": "", **source.config}
    write_json(scratch / "config.json", _of_type(config, gguf.TYPES[dtype]), allow_nan=True)
    if (card := source.folder / README).is_file() and source.is_temporary:
        write_text(scratch / README, card.read_text("utf-8"))


def _of_type(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A config whose parts all name the new dtype where they named one."""
    return {
        key: name
        if key in ("dtype", "torch_dtype")
        else _of_type(value, name)
        if isinstance(value, dict) and key.endswith("_config")
        else value
        for key, value in config.items()
    }
