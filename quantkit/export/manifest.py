"""The manifest of a checkpoint: its origin, how it was made, and a hash of every file.

It is written last, so its presence means that the checkpoint is complete.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.errors import CheckpointError
from quantkit.model import description
from quantkit.model.description import text, texts
from quantkit.nearby import similar, within
from quantkit.parsing import parse_json
from quantkit.recipe import AnyRecipe, Recipe
from quantkit.specs import PlainName, as_record, json_problem
from quantkit.storage import MANIFEST
from quantkit.tensorspec import TensorSpec

FILE = MANIFEST


class Record(BaseModel):
    """Part of a manifest. Keys of later versions are ignored, not refused."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class StoredFile(Record):
    sha256: str
    size_bytes: int


class Described(Record):
    """What the source says about itself, in its README, its config or its file's metadata."""

    license: str | list[str] | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: list[str] = []
    hub_id: str | None = None
    """The hub id that its own card gives, if any."""


class Source(Record):
    """The model that was quantised."""

    name: str
    revision: str | None
    fingerprint: str
    """`ModelSource.fingerprint`."""
    size_bytes: int
    dtype: str
    """The dtype of all tensors except those in `other_dtypes`."""
    other_dtypes: dict[str, str] = {}
    extra_tensors: dict[str, tuple[str, list[int]]] = {}
    """Tensors that the config does not describe, copied unchanged: dtype and shape."""
    described: Described | None = None
    """None in old manifests, which did not record it."""
    quantized_by: str | None = None
    """What had quantised its weights; None: nothing, or an old manifest."""


class Layer(Record):
    """What happened to one linear layer."""

    relative_error: float
    """Norm of the weight's change over the norm of the weight, folded scales undone."""
    output_error: float | None = None
    """Squared error of the layer's output on calibration data, over that output's square."""
    damping: float | None = None
    """What GPTQ added to the Gram matrix's diagonal, relative to its mean."""
    fallback: bool = False
    """Rounded to nearest because the method could not be applied."""
    held_out: dict[str, float] | None = None
    """Squared error of the output on held-out tokens, over that output's square, per rounding
    method (`gptq`, `rounding`); the one with the least was used. None: there was no choice.
    """


class Calibration(Record):
    """The data that a checkpoint was calibrated on."""

    name: str
    digest: str
    n_samples: int
    length: int
    """Length of the longest sample, to which the others are padded."""
    n_tokens: int | None = None
    """Real tokens of all samples; missing in old manifests, which have no padding."""
    perplexity: float | None = None
    """Perplexity of some of these tokens under the model during the pass; high for noise."""


class Converted(Record):
    """The checkpoint of which this is a conversion."""

    name: str
    format: str
    digest: str
    """Digest of its files."""
    manifest_sha256: str
    """Hash of its own manifest."""


class Manifest(Record):
    """Everything known about a checkpoint without opening its weights."""

    schema_version: Literal[1] = 1
    name: PlainName
    format: str
    engine: str = "native"
    """The quantiser: `native`, or another one and its version."""
    source: Source
    recipe: AnyRecipe
    recipe_digest: str
    """Digest of the recipe as executed, with every choice made."""
    asked_digest: str = ""
    """Digest of the recipe as written."""
    n_parameters: int
    size_bytes: int
    """Bytes of all tensors."""
    bits_per_weight: float
    quantized_bits_per_weight: float
    calibration: Calibration | None = None
    converted_from: Converted | None = None
    """None for a quantiser's own output."""
    layers: dict[str, Layer]
    files: dict[PlainName, StoredFile]
    versions: dict[str, str]
    device: str
    seconds: float
    stage_seconds: dict[str, float] = {}
    """Seconds per stage."""
    peak_host_bytes: int
    peak_device_bytes: int | None
    created: str
    notes: list[str] = []

    @property
    def weights_recipe(self) -> Recipe:
        """The recipe of a checkpoint that vLLM serves."""
        if not isinstance(self.recipe, Recipe):
            raise CheckpointError(
                f"{self.name} is a {self.format} file, which does not have such weights"
            )
        return self.recipe

    @property
    def digest(self) -> str:
        """A hash of the model's own files: equal for two runs that wrote the same bytes."""
        lines = [f"{name} {file.sha256}" for name, file in sorted(self.files.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def require_whole(self, folder: Path) -> None:
        """Refuse a folder whose files are missing or have another size; contents are not read."""
        for name, file in self.files.items():
            path = folder / name
            if not path.is_file():
                fault = f"{name} is missing"
            elif (size := path.stat().st_size) != file.size_bytes:
                fault = f"{name} has {size:,} bytes, its manifest says {file.size_bytes:,}"
            else:
                continue
            raise CheckpointError(
                f"{folder} is damaged: {fault}; `quantkit verify` lists everything, and copying "
                "or making it again repairs it"
            )

    def is_older(self, folder: Path) -> bool:
        """Whether a file was written after the manifest, which is the last of a checkpoint.

        Copies may have such times, too: only hashes can tell whether contents changed.
        """
        written = (folder / FILE).stat().st_mtime_ns
        return any((folder / name).stat().st_mtime_ns > written for name in self.files)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a checkpoint folder."""
        path = folder / FILE
        if not path.is_file():
            raise CheckpointError(
                f"{folder} is not a quantkit checkpoint: it has no {FILE}{within(folder, FILE)}"
                if folder.is_dir()
                else f"there is no folder {folder}{similar(folder)}"
            )
        try:
            data = parse_json(path.read_bytes(), finite=False)  # the fields show which ones differ
            if not isinstance(data, dict) or "schema_version" not in data:
                raise CheckpointError(
                    f"{path} is damaged: it must be a JSON object with a schema_version; copy the "
                    "checkpoint again"
                )
            if (version := data["schema_version"]) != 1:
                raise CheckpointError(
                    f"{path} has schema {version}, written by a newer quantkit; upgrade quantkit"
                )
            return as_record(cls, data)
        except ValidationError as error:
            first = json_problem(error, cls)
            raise CheckpointError(f"{path} is damaged: {first}") from error
        except (ValueError, KeyError, TypeError) as error:
            first = str(error).splitlines()[0]
            raise CheckpointError(f"{path} is damaged: {first}") from error


def is_checkpoint(path: Path) -> bool:
    """Whether a folder was written by quantkit."""
    return (path / FILE).is_file()


def source_record(
    name: str,
    revision: str | None,
    fingerprint: str,
    stored: list[TensorSpec],
    unknown: list[str],
    usual_dtype: str,
    described: Described | None = None,
) -> Source:
    """What the manifest keeps about a source: enough to know every tensor without it."""
    return Source(
        name=name,
        revision=revision,
        fingerprint=fingerprint,
        size_bytes=sum(spec.size_bytes for spec in stored),
        dtype=usual_dtype,
        other_dtypes={s.name: s.dtype for s in stored if s.dtype != usual_dtype},
        extra_tensors={s.name: (s.dtype, list(s.shape)) for s in stored if s.name in unknown},
        described=described,
    )


def describe_folder(folder: Path, config: Mapping[str, Any]) -> Described:
    """What a model folder says about itself; anything else stays unknown."""
    card = description.read(folder)
    licenses = texts(card.get("license")) or texts(config.get("license"))
    return Described(
        license=licenses[0] if len(licenses) == 1 else licenses or None,
        license_name=text(card.get("license_name")),
        license_link=text(card.get("license_link")),
        languages=texts(card.get("language")),
        hub_id=description.own_name(card),
    )


def describe_file(metadata: Mapping[str, Any]) -> Described:
    """The same for a GGUF file."""
    return Described(
        license=text(metadata.get("general.license")),
        license_name=text(metadata.get("general.license.name")),
        license_link=text(metadata.get("general.license.link")),
        languages=texts(metadata.get("general.languages")),
    )


def versions() -> dict[str, str]:
    """Versions of the software that determines the result."""
    import platform
    from importlib.metadata import version

    import quantkit

    packages = ("torch", "transformers", "safetensors", "compressed-tensors")
    return {
        "quantkit": quantkit.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def now() -> str:
    """The current time, as manifests write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
