"""What a calibration set is made of: one YAML file of `calibration/`, or a team's own."""

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
    """Its share of the tokens, against the others'; without any weights, what each has."""
    name: str = ""
    """What it is called in tables; its path or dataset if not given."""
    licence: str | None = None
    """Under which its rows may be used; for people."""
    max_rows: int | None = Field(default=None, gt=0)
    """Read no more than these."""


class _Rows(_Source):
    columns: Mapping[str, str] = Field(default_factory=dict)
    """Which of its fields is our `messages`, `text`, `prompt`, `completion` and so on."""
    rows: Kind | None = None
    """What its rows are, where their fields do not tell."""


class Files(_Rows):
    """A file, a folder of files, or a pattern such as `logs/*.jsonl.gz`."""

    kind: Literal["files"]
    path: str
    """Relative to the YAML file."""


class Hub(_Rows):
    """A dataset of the Hugging Face hub, streamed."""

    kind: Literal["hub"]
    dataset: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None


class Stdin(_Rows):
    """JSON lines or text on standard input."""

    kind: Literal["stdin"]


class Python(_Source):
    """What every Python has on board: its documentation, or its library's sources."""

    kind: Literal["python-docs", "python-source"]


SourceSpec = Annotated[Files | Hub | Stdin | Python, Field(discriminator="kind")]


class SetSpec(_Strict):
    """A mix of sources, and how samples are chosen from it."""

    summary: str = ""
    sources: list[SourceSpec] = Field(min_length=1)
    n_samples: int = Field(default=N_SAMPLES, gt=0)
    max_length: int = Field(default=MAX_LENGTH, gt=1)
    """Tokens of a sample, or the model's context if that is shorter."""
    short: Literal["pack", "pad"] = "pack"
    """Rows shorter than a sample: several in one, or one with padding that no statistic sees."""
    select: Literal["cover", "random"] = "cover"
    """Samples that stand for the whole pool, or any."""
    chat: Literal["template", "plain"] = "template"
    """Chats through the model's chat template, or as plain text for a model that has none."""
    near_duplicates: float | None = Field(default=0.8, gt=0, le=1)
    """Rows this alike (Jaccard similarity of word triples) count once; null keeps all."""
    redact: bool | list[str] = False
    """Replace e-mail addresses, phone and card numbers, keys and IP addresses; or some of these."""
    avoid: list[str] = Field(default_factory=list)
    """Tasks or files that models will be scored on: rows that share 13 words with them are out."""
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
    """What a source is called in tables and manifests."""
    if source.name:
        return str(source.name)
    if isinstance(source, Files):
        path = Path(source.path)
        return path.name if path.name not in ("", "*") else source.path
    if isinstance(source, Hub):
        return source.dataset if source.config is None else f"{source.dataset}/{source.config}"
    return str(source.kind)


def read(path: Path) -> SetSpec:
    """A set's file; everything that is wrong with it is said at once."""
    data = read_yaml(path, DataError)
    if not isinstance(data, dict):
        raise DataError(f"{path} is not a calibration set: it has no fields such as `sources`")
    try:
        return SetSpec.model_validate(data)
    except ValidationError as error:
        raise DataError(f"{path} is not a valid calibration set:\n" + _problems(error)) from error


def changed(wanted: SetSpec, changes: Mapping[str, Any], name: str) -> SetSpec:
    """The same set with other values for some fields, checked like the file itself."""
    data = wanted.model_dump(mode="json") | dict(changes)
    try:
        return SetSpec.model_validate(data)
    except ValidationError as error:
        raise DataError(f"{name} cannot be built like that:\n" + _problems(error)) from error


def of_files(paths: Sequence[str]) -> SetSpec:
    """A set of files, folders, patterns, or of `-`, standard input."""
    ends = [Path(path).name for path in paths]
    sources: list[Any] = [
        {"kind": "stdin"}
        if path == "-"
        # Files of the same name in several folders are told apart by their paths.
        else {"kind": "files", "path": path, "name": path if ends.count(end) > 1 else ""}
        for path, end in zip(paths, ends, strict=True)
    ]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise DataError(f"{twice} is given twice; give it once")
    data = {"summary": f"rows of {', '.join(paths)}", "sources": sources}
    try:
        return SetSpec.model_validate(data)
    except ValidationError as error:
        raise DataError(f"{', '.join(paths)} make no set:\n" + _problems(error)) from error


def _problems(error: ValidationError) -> str:
    return "\n".join(f"  {line}" for line in problems(error, SetSpec))
