"""A calibration set as a folder: tokens, readable samples, and a manifest of how it was made.

    tokens.safetensors   `input_ids` [samples, length] and `lengths` [samples]
    samples.parquet      every piece of every sample: source, position, text, reason for selection
    images/              images of chats, named by hash, if there are any
    calibration.json     the manifest, written last

The same sources and seed give the same bytes, so no file contains a timestamp.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from quantkit.calibration.choosing.figures import Figures
from quantkit.calibration.images import Picture
from quantkit.calibration.lookup import FILE as FILE
from quantkit.calibration.lookup import is_set as is_set
from quantkit.calibration.lookup import require_set
from quantkit.calibration.spec import SetSpec
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import DataError
from quantkit.model.shards import write_whole
from quantkit.parsing import parse_json
from quantkit.specs import as_record, json_problem
from quantkit.storage import scratch_folder, sha256_of, write_json

TOKENS = "tokens.safetensors"
SAMPLES = "samples.parquet"
IMAGES = "images"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SourceRecord(_Record):
    """What a source contributed, and what happened to all its rows."""

    name: str
    share: float
    """Requested share of the set's tokens."""
    n_tokens: int
    """Tokens it contributed."""
    licence: str | None = None
    digest: str
    files: dict[str, str] = {}
    """sha256 by name."""
    rows: dict[str, int]
    """How many were read, and what happened to them: all other numbers add up to that one."""
    remarks: dict[str, int] = {}
    examples: dict[str, str] = {}
    """An example sentence for each outcome."""


class Tokenizer(_Record):
    """The tokenizer that encoded the text."""

    model: str
    digest: str
    template_digest: str | None = None
    vocabulary: int
    widest: int | None = None
    """Input width of the model's widest layer."""


class Pool(_Record):
    """The pool that samples were selected from."""

    n_pieces: int
    n_tokens: int
    n_clusters: int
    lengths: list[int]
    """Quantiles of the pieces' lengths, from 0 to 100% in steps of 5."""
    set_lengths: list[int]
    """The same for the pieces in the set."""


class Manifest(_Record):
    """Everything known about a set without opening its tokens."""

    schema_version: Literal[1] = 1
    name: str
    spec: SetSpec
    n_samples: int
    length: int
    n_tokens: int
    tokenizer: Tokenizer
    sources: list[SourceRecord]
    pool: Pool
    figures: Figures
    random: Figures | None = None
    """The mean of random draws from the same pool."""
    n_random: int = 0
    redacted: dict[str, int] = {}
    avoided: dict[str, str] = {}
    """Digest of the evaluation text by its name."""
    digest: str
    """`CalibrationTokens.digest`."""
    files: dict[str, str] = {}
    version: str


@dataclass(frozen=True)
class CalibrationSet:
    """Tokens, their text, and their origin."""

    tokens: CalibrationTokens
    samples: list[dict[str, Any]]
    manifest: Manifest

    def write(self, target: Path, force: bool = False) -> None:
        """Write a complete folder, or none."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with scratch_folder(target, force, marker=FILE) as scratch:
            lengths = self.tokens.lengths
            n_samples, length = self.tokens.ids.shape
            stored = {
                "input_ids": self.tokens.ids.to(torch.int32).contiguous(),
                "lengths": torch.full((n_samples,), length, dtype=torch.int32)
                if lengths is None
                else lengths.to(torch.int32),
            }
            write_whole(scratch / TOKENS, stored)
            pq.write_table(
                pa.Table.from_pylist(self.samples), scratch / SAMPLES, compression="zstd"
            )
            for picture in {
                one.name: one for some in self.tokens.pictures for one in some
            }.values():
                (scratch / IMAGES).mkdir(exist_ok=True)
                (scratch / IMAGES / picture.name).write_bytes(picture.data)
            files = {name: sha256_of(scratch / name) for name in (TOKENS, SAMPLES)}
            record = self.manifest.model_copy(update={"files": files})
            write_json(scratch / FILE, record.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    """A set's manifest."""
    try:
        return as_record(Manifest, parse_json((folder / FILE).read_bytes()))
    except ValidationError as error:
        first = json_problem(error, Manifest)
        raise DataError(
            f"{folder} is not a calibration set that this version reads: {first}"
        ) from error
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise DataError(
            f"{folder} is not a calibration set that this version reads: {first}"
        ) from error


def read(folder: Path) -> CalibrationSet:
    """A set from its folder, checked against its manifest."""
    import pyarrow
    import pyarrow.parquet as pq

    require_set(folder)
    manifest = read_manifest(folder)
    for name in (TOKENS, SAMPLES):
        path = folder / name
        if not path.is_file() or sha256_of(path) != manifest.files.get(name):
            raise DataError(f"{path} does not match its digest in {FILE}; build the set again")
    try:
        stored = load_file(folder / TOKENS)
        ids, lengths = stored["input_ids"].long(), stored["lengths"]
        _require_shapes(ids, lengths, manifest)
        samples = pq.read_table(folder / SAMPLES).to_pylist()
    except (OSError, ValueError, KeyError, SafetensorError, pyarrow.ArrowException) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{folder} is damaged: {first}; build the set again") from error
    lengths = _unless_full(lengths, manifest.length)
    pictures = _pictures(folder, samples, len(ids))
    return CalibrationSet(
        CalibrationTokens(manifest.name, ids, lengths, pictures), samples, manifest
    )


def _pictures(
    folder: Path, samples: list[dict[str, Any]], n_samples: int
) -> tuple[tuple[Picture, ...], ...]:
    """The images of every sample, each checked against its name."""
    found: list[list[Picture]] = [[] for _ in range(n_samples)]
    for piece in samples:
        for name in piece.get("images") or ():
            path = folder / IMAGES / name
            try:
                picture = Picture(path.read_bytes())
            except OSError as error:
                raise DataError(
                    f"cannot read {path}: {error.strerror}; build the set again"
                ) from error
            if picture.name != name:
                raise DataError(f"{path} was changed; build the set again")
            found[piece["sample"]].append(picture)
    return tuple(map(tuple, found)) if any(found) else ()


def _require_shapes(ids: torch.Tensor, lengths: torch.Tensor, manifest: Manifest) -> None:
    if ids.dim() != 2 or lengths.shape != ids.shape[:1] or ids.shape[1] != manifest.length:
        raise ValueError(f"{TOKENS} has another shape than {FILE} declares")
    if not ids.numel() or not bool(((lengths > 0) & (lengths <= manifest.length)).all()):
        raise ValueError(f"{TOKENS} has empty samples")
    if bool((ids < 0).any()) or int(ids.max()) >= manifest.tokenizer.vocabulary:
        raise ValueError(f"{TOKENS} holds tokens that are not in the vocabulary")


def _unless_full(lengths: torch.Tensor, length: int) -> torch.Tensor | None:
    return None if bool((lengths == length).all()) else lengths.long()


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of everything that determines how text is tokenised."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        known = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # transient settings
            known.pop(state, None)
    else:
        known = {"vocabulary": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def template_digest(tokenizer: Any) -> str | None:
    """Digest of the chat template, if there is one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def require_tokenizer(manifest: Manifest, tokenizer: Any, where: str) -> None:
    """Refuse tokens that mean something else to this model."""
    if manifest.tokenizer.digest != tokenizer_digest(tokenizer):
        raise DataError(
            f"{where} was made with the tokenizer of {manifest.tokenizer.model}, which is "
            "not this model's; build it again with --model"
        )
