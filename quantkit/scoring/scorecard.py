"""The scores of one model, with everything needed to know what was scored."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from quantkit.errors import ScoreError
from quantkit.export.verified import Agreement, Attribution, Verified
from quantkit.parsing import parse_json
from quantkit.specs import as_record, json_problem, plain_name

SOURCE_NAME = "source"
"""File name of a source's scores, whatever the model is called."""


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Score(Record):
    """One value, unrounded."""

    value: float
    stderr: float | None
    n: int
    """Documents or questions; for perplexity per token the tokens."""
    higher_is_better: bool = False

    @field_validator("value")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a score")
        return value


class Settings(Record):
    """What must be equal for two scores to be comparable."""

    tasks: dict[str, str]
    """Task names and their versions."""
    limit: int | None
    num_fewshot: int | None
    max_length: int
    """Tokens per window; the model's context by default."""
    asked_length: int | None = None
    dtype: str = "float32"
    """The compute dtype."""
    seed: int
    data: dict[str, str] | None = None
    """A digest of the documents by task; None in old files."""
    chat: str | None = None
    """How questions were put as a conversation; None where they were not."""

    def differences(self, other: "Settings") -> list[str]:
        """What makes two scores incomparable, such as `limit: 100 against none`."""
        ours, theirs = self.model_dump(), other.model_dump()
        lines = list(_unlike_tasks(self.tasks, other.tasks))
        for key in ours:
            if key not in ("tasks", "data") and ours[key] != theirs[key]:
                one, another = (
                    "none" if value is None else value for value in (ours[key], theirs[key])
                )
                lines.append(f"{key}: {one} against {another}")
        if self.data is not None and other.data is not None:
            names = [t for t in self.data if self.data[t] != other.data.get(t, self.data[t])]
            if self.tasks.keys() == other.tasks.keys():  # otherwise these are named already
                names += sorted(self.data.keys() ^ other.data.keys())
            lines += [f"the documents of {', '.join(names[:3])}"] if names else []
        return lines

    def same_as(
        self, tasks: Sequence[str], limit: int | None, max_length: int | None, device: str
    ) -> bool:
        """Whether a run with these settings would score the same way."""
        from quantkit.device import choose

        dtype = "bfloat16" if choose(device).type == "cuda" else "float32"
        asked = (set(tasks), limit, max_length, dtype)
        return asked == (set(self.tasks), self.limit, self.asked_length, self.dtype)


def _unlike_tasks(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    """Tasks that only one of two has, and those of which they have different versions."""
    for task in dict.fromkeys([*ours, *theirs]):
        if task not in ours or task not in theirs:
            yield f"only one was scored on {task}"
        elif ours[task] != theirs[task]:
            yield f"version of {task}: {ours[task]} against {theirs[task]}"


class LayerError(Record):
    """The quantisation error of one layer."""

    weight: float
    """Norm of the weight's change over the norm of the weight."""
    output: float | None = None
    """Squared error of its output on calibration data, relative to that output's square."""


class Provenance(Record):
    """How a checkpoint was made, from its manifest, or from the config that other tools wrote."""

    method: str
    """`gptq`, `awq` and so on, or the mixture of a GGUF file."""
    weight_bits: int | None = None
    """Of the quantised layers; None where they differ."""
    weight_type: str | None = None
    """`int` or `float`."""
    weight_strategy: str | None = None
    """What shares a scale: `channel`, `group`, `block` or `tensor`; None in old files."""
    runs_as: str | None = None
    """One of `hardware.support.FORMATS`; None in old files."""
    activation_bits: int | None = None
    """None where activations stay in 16 bits."""
    recipe_digest: str
    engine: str
    calibration: str | None = None
    calibration_digest: str | None = None
    calibration_perplexity: float | None = None
    """Perplexity of the calibration tokens under the model itself."""
    disk_bytes: int
    """Size of all its files."""
    seconds: float | None = None
    """This and what follows: None for other tools' checkpoints."""
    peak_host_bytes: int | None = None
    peak_device_bytes: int | None = None
    device: str | None = None
    by_others: str | None = None
    """Who made it and how, from its own config, where that was not quantkit."""
    source_quantized_by: str | None = None
    """What had quantised the weights that it was made from; None: nothing, or an old file."""
    layers: dict[str, LayerError] = {}
    formats: list[list[str]] = []
    """Layers, blocks and format, where layers differ in it."""


class Served(Record):
    """The engine at an address, and how it was found to serve the scored model."""

    url: str
    model: str
    """The engine's name for it."""
    root: str = ""
    """What it reports to have loaded."""
    version: str | None = None
    max_model_len: int | None = None
    started: float | None = None
    """When its process began, in seconds since 1970; None where it does not say."""
    agreement: Agreement
    """Its log-probabilities of some prompts compared with those of the model in the folder."""
    attribution: Attribution | None = None
    """Whether it serves a checkpoint or its source; None without a source to compare with."""


class Scorecard(Record):
    """One model's scores."""

    schema_version: Literal[1] = 1
    name: str
    recipe: str | None
    """None for a source model."""
    format: str
    size_bytes: int
    bits_per_weight: float
    digest: str
    """What was scored: a source's fingerprint or a checkpoint's digest."""
    source_fingerprint: str
    """The source model that it is, or was made from; empty if others made it and it is not
    known.
    """
    likeness: str | None = None
    """Architecture and vocabulary, by which other tools' checkpoints are matched with a source."""
    scores: dict[str, Score]
    """By `<task>/<metric>`."""
    settings: Settings
    made: Provenance | None = None
    """None for a source, and in old files."""
    verified: Verified | None = None
    """How a serving engine handled it, if the checkpoint's folder says so."""
    served: Served | None = None
    """The engine that answered, where that was a server."""
    cached: dict[str, float] = {}
    """By task or group: the share of answers from an earlier run's cache; omitted where none."""
    groups: dict[str, list[str]] = {}
    """Groups of tasks and their tasks."""
    versions: dict[str, str]
    device: str
    seconds: float
    created: str

    @model_validator(mode="after")
    def _names_a_file(self) -> "Scorecard":
        if self.recipe is not None:  # a source's file has another name
            plain_name(self.name)
        return self

    @property
    def file_name(self) -> str:
        """Its file name in a folder of scores."""
        return f"{SOURCE_NAME if self.recipe is None else self.name}.json"

    @property
    def answers_name(self) -> str:
        """The name of the file next to it that holds its individual answers."""
        return f"{SOURCE_NAME if self.recipe is None else self.name}.answers.parquet"

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def read(cls, path: Path) -> "Scorecard":
        """A scorecard from its file."""
        try:
            return as_record(cls, parse_json(path.read_bytes()))
        except OSError as error:
            raise ScoreError(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            first = json_problem(error, cls)
            raise ScoreError(f"{path} is not a score file: {first}") from error
        except ValueError as error:
            raise ScoreError(f"{path} is not valid JSON: {error}; give a score file") from error
