"""`verified.json`: what a real serving engine did with a checkpoint, stored beside it.

It is valid for the files whose digest it names. Once these change it is stale, and is not shown.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.engine import label
from quantkit.errors import CheckpointError
from quantkit.hardware import gpus
from quantkit.parsing import parse_json
from quantkit.specs import as_record
from quantkit.storage import write_json

if TYPE_CHECKING:
    from quantkit.export.manifest import Manifest

FILE = "verified.json"
Level = Literal["config", "generate", "logprobs"]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Agreement(Record):
    """An engine's log-probabilities against our reference's, token by token, in nats."""

    n_tokens: int
    mean: float
    """Mean absolute difference."""
    p99: float
    """99th percentile of the differences."""
    largest: float
    noise_mean: float
    """The same for the reference in the engine's dtype against the reference in float32."""
    noise_p99: float
    limit_mean: float
    """The limit derived from it: more than this is not rounding."""
    limit_p99: float
    by_text: list[float] = []
    """Mean of each text, if there are few."""
    by_place: list[float] = []
    """Mean of each position: with a drifting state it grows, a wrong kernel is off at once."""


class Attribution(Record):
    """Whose answers an engine gave: the checkpoint's, or its unquantised source's."""

    n_tokens: int
    apart: float
    """Mean difference between the two references, in nats."""
    ratio: float
    """Log-likelihood ratio in nats per token; positive if the checkpoint is likelier."""
    noise: float
    """The engine's rounding over that of our own reference in its dtype, at least 1."""
    power: float
    """How often an engine that serves the source, with that rounding, would be recognised."""
    recognised: float
    """How often an engine that serves the checkpoint would be recognised."""
    nearer: Literal["checkpoint", "source"] | None
    """None if either would be missed too often: these tokens cannot distinguish the two."""
    prompts_needed: int | None = None
    """If so, about how many prompts would be enough."""


class Verified(Record):
    """The result of one engine with one checkpoint."""

    schema_version: Literal[1] = 1
    ok: bool
    digest: str
    """Digest of the manifest's files, to which this applies."""
    engine: str
    version: str
    device: str
    """The GPU, or the processor."""
    dtype: str | None
    """The dtype that the engine computed in."""
    quantization: str | None = None
    """The quantisation format that the engine detected."""
    level: Level
    """How far it went: the config alone, generated text, or log-probabilities."""
    faults: list[str] = []
    n_generated: int = 0
    """Prompts that were continued greedily."""
    texts: list[str] = []
    """The generated continuations."""
    written: Agreement | None = None
    """Agreement on the tokens it generated."""
    n_scored: int = 0
    read: Agreement | None = None
    """Agreement on prompts it read."""
    attribution: Attribution | None = None
    """Whether it served the checkpoint or the source; None without a source."""
    prompts_digest: str | None = None
    seconds: dict[str, float] = {}
    versions: dict[str, str] = {}
    created: str

    @property
    def sentence(self) -> str:
        """For cards, reports and terminals."""
        engine = f"{label(self.engine)} {self.version} on {gpus.label(self.device)}"
        if not self.ok:
            verb = "is not proven" if self.undecided else "fails"
            return f"{verb} in {engine}: {'; '.join(self.faults)}"
        if self.level == "config":
            return f"{engine} accepts its config"
        loads = f"{engine} loads it and generates"
        if self.read is None:
            return loads
        kind = f"to {self.dtype} " if self.dtype else ""  # servers do not report it
        return (
            f"{loads}; log-probabilities of {self.n_scored} prompts differ from the dequantised "
            f"reference by {self.read.mean:.4f} on average, where rounding {kind}alone "
            f"makes {self.read.noise_mean:.4f}{self._attributed}"
        )

    @property
    def _attributed(self) -> str:
        if self.attribution is None:
            return ""
        return (
            "; they are the checkpoint's and not the unquantised source's "
            f"(power of that test: {self.attribution.power:.2f})"
        )

    @property
    def undecided(self) -> bool:
        """Whether the only problem is that the source would have passed as well."""
        found = self.attribution
        return found is not None and found.nearer is None and len(self.faults) == 1

    @property
    def short(self) -> str:
        """A cell of a table."""
        what = {"config": "config", "generate": "text", "logprobs": "log-probabilities"}[self.level]
        word = what if self.ok else f"{what} {'undecided' if self.undecided else 'wrong'}"
        return f"{label(self.engine)} {self.version}: {word}"

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def write(folder: Path, record: Verified) -> None:
    """Write it beside the checkpoint."""
    write_json(folder / FILE, record.to_json())


def read(folder: Path) -> Verified | None:
    """The record beside a checkpoint; None if there is none."""
    path = folder / FILE
    try:
        return as_record(Verified, parse_json(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError, ValidationError) as error:
        raise CheckpointError(
            f"{path} is damaged; remove it, and verify the checkpoint again"
        ) from error


def current(folder: Path, manifest: "Manifest") -> Verified | None:
    """The same, unless the checkpoint has changed since."""
    found = read(folder)
    return found if found is not None and found.digest == manifest.digest else None
