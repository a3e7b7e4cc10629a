"""Definition of a calibration set: a YAML file in `calibration/`, or the user's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quantkit.calibration.reading.row import Kind
from quantkit.calibration.redaction.redact import KINDS
from quantkit.errors import DataError, UnknownName
from quantkit.specs import problems, read_yaml

N_SAMPLES = 256
MAX_LENGTH = 2048
USUAL_SAMPLES = (128, 512)


class _Strict(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")


class _Source(_Strict):
    weight: float | None = Field(default=None, gt=0, le=1e6)
    """Its share of the tokens, relative to the others; if no source has one, proportional to its
    size.
    """
    name: str = ""
    """Its name in tables; by default its path or dataset."""
    licence: str | None = None
    """Licence of its rows; informational."""
    max_rows: int | None = Field(default=None, gt=0)
    """Most rows to read."""


class _Rows(_Source):
    columns: Mapping[str, str] = Field(default_factory=dict)
    """Its fields that correspond to our `messages`, `text`, `prompt`, `completion` and so on."""
    rows: Kind | None = None
    """Kind of its rows, if their fields do not show it."""


class Files(_Rows):
    """A file, a folder of files, or a pattern such as `logs/*.jsonl.gz`."""

    kind: Literal["files"]
    path: str
    """Relative to the YAML file."""


class Hub(_Rows):
    """A dataset on the Hugging Face hub, streamed."""

    kind: Literal["hub"]
    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None


class Stdin(_Rows):
    """JSON lines or text on standard input."""

    kind: Literal["stdin"]


class Python(_Source):
    """Text bundled with Python: its documentation, or its library's sources."""

    kind: Literal["python-docs", "python-source"]


SourceSpec = Annotated[Files | Hub | Stdin | Python, Field(discriminator="kind")]


class SetSpec(_Strict):
    """A mix of sources, and how samples are selected from it."""

    summary: str = ""
    sources: list[SourceSpec] = Field(min_length=1)
    n_samples: int = Field(default=N_SAMPLES, gt=0)
    max_length: int = Field(default=MAX_LENGTH, gt=1)
    """Tokens per sample, or the model's context if that is shorter."""
    short: Literal["pack", "pad"] = "pack"
    """Rows shorter than a sample: pack several into one, or pad, with padding left out of
    statistics.
    """
    select: Literal["cover", "random"] = "cover"
    """Samples that represent the whole pool, or random ones."""
    chat: Literal["template", "plain"] = "template"
    """Chats through the model's chat template, or as plain text for a model without one."""
    near_duplicates: float | None = Field(default=0.8, gt=0, le=1)
    """Rows this alike (Jaccard similarity of word triples) count once; null keeps all."""
    redact: bool | list[str] = False
    """Replace e-mail addresses, phone and card numbers, keys and IP addresses; or some of these."""
    avoid: list[str] = Field(default_factory=list)
    """Tasks or files that models will be scored on: rows that share 13 words with them are left
    out.
    """
    seed: int = Field(default=0, ge=0, lt=2**32)

    @field_validator("redact")
    @classmethod
    def _known_kinds(cls, value: bool | list[str]) -> bool | list[str]:
        for kind in [] if isinstance(value, bool) else value:
            if kind not in KINDS:
                raise ValueError(str(UnknownName("kind of redaction", kind, KINDS)))
        return value

    @model_validator(mode="after")
    def _all_weights_or_none(self) -> "SetSpec":
        given = [source.weight is not None for source in self.sources]
        if any(given) and not all(given):
            raise ValueError("give every source a weight, or none")
        named = [source_name(source) for source in self.sources]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise ValueError(f"two sources are called {twice[0]}; give each a `name`")
        return self


def source_name(source: Any) -> str:
    """A source's name in tables and manifests."""
    if source.name:
        return str(source.name)
    if isinstance(source, Files):
        path = Path(source.path)
        return path.name if path.name not in ("", "*") else source.path
    if isinstance(source, Hub):
        return source.dataset if source.config is None else f"{source.dataset}/{source.config}"
    return str(source.kind)


def read(path: Path) -> SetSpec:
    """Read a set's file; all its problems are reported at once."""
    data = read_yaml(path, DataError)
    if not isinstance(data, dict):
        raise DataError(f"{path} is not a calibration set: it has no fields such as `sources`")
    try:
        return SetSpec.model_validate(data)
    except ValidationError as error:
        raise DataError(f"{path} is not a valid calibration set:\n" + _problems(error)) from error


def changed(wanted: SetSpec, changes: Mapping[str, Any], name: str) -> SetSpec:
    """The same set with some fields changed, validated like the file itself."""
    data = wanted.model_dump(mode="json") | dict(changes)
    try:
        return SetSpec.model_validate(data)
    except ValidationError as error:
        raise DataError(
            f"{name} cannot be built with these options:\n" + _problems(error)
        ) from error


def of_files(paths: Sequence[str]) -> SetSpec:
    """A set of files, folders and patterns, or of `-`, standard input."""
    ends = [Path(path).name for path in paths]
    sources: list[Any] = [
        {"kind": "stdin"}
        if path == "-"
        # Files of the same name in several folders are distinguished by their paths.
        else {"kind": "files", "path": path, "name": path if ends.count(end) > 1 else ""}
        for path, end in zip(paths, ends, strict=True)
    ]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise DataError(f"{twice} is given twice; give it once")
    data = {"summary": f"rows of {', '.join(paths)}", "sources": sources}
    try:
        return SetSpec.model_validate(data)
    except ValidationError as error:
        raise DataError(
            f"cannot build a set from {', '.join(paths)}:\n" + _problems(error)
        ) from error


def _problems(error: ValidationError) -> str:
    return "\n".join(f"  {line}" for line in problems(error, SetSpec))
