"""Calibration tokens: a named set or a text file, cut into samples of one length."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit import resources
from quantkit.calibration import python_text
from quantkit.errors import DataError

TEXT_ENDINGS = (".txt", ".raw", ".md")


class SourceSpec(BaseModel):
    """Where text comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: Literal["python-docs"]
    weight: float = Field(default=1.0, gt=0)


class SetSpec(BaseModel):
    """One YAML file of `calibration/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    summary: str
    sources: list[SourceSpec] = Field(min_length=1)
    n_samples: int = Field(gt=0)
    max_length: int = Field(gt=1)
    seed: int = 0


@dataclass(frozen=True)
class CalibrationTokens:
    """Samples of equal length, and a digest that tells them apart from all others."""

    name: str
    ids: torch.Tensor
    """[samples, length]"""

    @property
    def digest(self) -> str:
        raw = self.ids.to(torch.int32).contiguous().numpy().tobytes()
        return hashlib.sha256(f"{tuple(self.ids.shape)}".encode() + raw).hexdigest()


def load(
    name: str,
    tokenizer: Any,
    context: int,
    vocabulary: int,
    n_samples: int | None = None,
    length: int | None = None,
) -> CalibrationTokens:
    """Tokens of a named set, of a set's file, or of a plain text file."""
    if name.endswith(TEXT_ENDINGS):
        path = Path(name)
        try:
            texts = [path.read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read calibration text {name}: {error}") from error
        n_samples, length, seed = n_samples or 128, length or min(2048, context), None
    else:
        spec = read_spec(resources.find("calibration", name))
        texts = [d.text for d in (*python_text.topics("train"), *python_text.docstrings("train"))]
        n_samples, length = n_samples or spec.n_samples, length or min(spec.max_length, context)
        seed = spec.seed
    if length > context:
        raise DataError(
            f"samples of {length} tokens are longer than the model's context, {context}"
        )
    ids = torch.tensor([i for text in texts for i in tokenizer(text, verbose=False)["input_ids"]])
    if not len(ids):
        raise DataError(f"calibration text {name} is empty")
    if int(ids.max()) >= vocabulary:
        raise DataError(
            f"the tokenizer gives the id {int(ids.max())}, the model has {vocabulary} tokens: "
            "they do not belong together"
        )
    available = len(ids) // length
    if available < n_samples:
        raise DataError(
            f"{name} has {len(ids):,} tokens, enough for {available} samples of {length}; "
            f"{n_samples} were asked for: give more text, or lower --samples or --length"
        )
    windows = ids[: available * length].view(available, length)
    if seed is None:
        return CalibrationTokens(name, windows[:n_samples])
    order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
    return CalibrationTokens(name, windows[order[:n_samples]])


def read_spec(path: Path) -> SetSpec:
    """A calibration set's file."""
    try:
        return SetSpec.model_validate(yaml.safe_load(path.read_bytes()))
    except (yaml.YAMLError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise DataError(f"{path} is no valid calibration set: {first}") from error
