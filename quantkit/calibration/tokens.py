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
    """Samples padded to one length, and a digest that tells them apart from all others."""

    name: str
    ids: torch.Tensor
    """[samples, length]; what stands behind a sample's real tokens does not matter."""
    lengths: torch.Tensor | None = None
    """[samples], how many tokens of each sample are real; None where all are."""

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        n_samples, length = self.ids.shape
        if self.lengths.shape != (n_samples,):
            raise DataError(
                f"{self.name} has {n_samples} samples but {self.lengths.numel()} lengths of them"
            )
        wrong = ((self.lengths < 1) | (self.lengths > length)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise DataError(
                f"sample {place} of {self.name} has {int(self.lengths[place])} tokens: it must "
                f"have 1 to {length}; leave empty samples out"
            )

    @property
    def mask(self) -> torch.Tensor | None:
        """Which positions are real [samples, length]; None where all are."""
        length = self.ids.shape[1]
        if self.lengths is None or bool((self.lengths == length).all()):
            return None
        return torch.arange(length) < self.lengths[:, None]

    @property
    def n_tokens(self) -> int:
        """Real tokens of all samples."""
        return self.ids.numel() if self.lengths is None else int(self.lengths.sum())

    @property
    def digest(self) -> str:
        ids, what, mask = self.ids, f"{tuple(self.ids.shape)}", self.mask
        if mask is not None:
            assert self.lengths is not None
            ids, what = ids * mask, f"{what} {self.lengths.tolist()}"
        raw = ids.to(torch.int32).contiguous().numpy().tobytes()
        return hashlib.sha256(what.encode() + raw).hexdigest()

    def longest_first(self) -> "CalibrationTokens":
        """The same samples by falling length, so that padding gathers in the last batches."""
        if self.lengths is None:
            return self
        order = self.lengths.argsort(descending=True, stable=True)
        return CalibrationTokens(self.name, self.ids[order], self.lengths[order])


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
