"""Results of steps: a folder of files and, written last, a record that names and hashes them.

    results/STEP/step.json     the record; its presence means that the step is finished
    results/STEP/TOKEN/...     the files, in a folder that no other attempt writes to

So two workers that do the same step, because one was thought dead, cannot mix their files.
"""

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.errors import StorageError
from quantkit.specs import PlainName, PlainPath
from quantkit.storage import sha256_of
from quantkit.sweep.graph import Step
from quantkit.sweep.place import Place

FOLDER = "results"
RECORD = "step.json"
CHECKPOINT = "checkpoint"
"""The folder of a model within a step's result."""
SMALL = 64 << 20
"""Files up to this size are read for checking; larger ones when a step uses them."""


class Tampered(StorageError):
    """A result does not match its record."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step

    def __reduce__(self) -> Any:
        return Tampered, (self.step, str(self))


class StoredFile(BaseModel):
    """One file of a result."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sha256: str
    size_bytes: int


class Record(BaseModel):
    """What is known of a finished step."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    step: PlainName
    kind: str
    title: str
    digest: str
    """Digest of the inputs: the step's own."""
    inputs: dict[str, str]
    """The results it took, and the identity of each."""
    identity: str
    """Digest of the outputs: the same for two runs with the same result, whenever they ran."""
    facts: dict[str, Any] = {}
    """A few figures, for tables."""
    folder: PlainName
    files: dict[PlainPath, StoredFile]
    seconds: float
    attempt: int = 1
    host: str = ""
    device: str = ""
    created: str = ""
    seal: str = ""
    """A hash of everything else."""

    def sealed(self) -> "Record":
        """The same with its hash."""
        return self.model_copy(update={"seal": self._hash()})

    def is_sound(self) -> bool:
        """Whether the record itself is unchanged."""
        return self.seal == self._hash()

    def _hash(self) -> str:
        content = self.model_dump(mode="json", exclude={"seal"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Product:
    """What a step made, before it is published."""

    folder: Path
    """Finished files on this machine; they are moved from there."""
    identity: str
    facts: Mapping[str, Any]
    device: str = ""


@dataclass(frozen=True)
class Circumstances:
    """How a step went."""

    seconds: float
    attempt: int
    host: str
    created: str


def publish(
    place: Place,
    step: Step,
    product: Product,
    inputs: Mapping[str, str],
    how: Circumstances,
) -> Record:
    """Publish a result, the record last; if the same exists already, that is kept."""
    before = load(place, step.name)
    if before is not None and before.inputs == dict(inputs) and not faults(place, before):
        return before
    token = uuid.uuid4().hex[:12]
    files = {
        path.relative_to(product.folder).as_posix(): StoredFile(
            sha256=sha256_of(path), size_bytes=path.stat().st_size
        )
        for path in sorted(product.folder.rglob("*"))
        if path.is_file()
    }
    place.publish(product.folder, f"{FOLDER}/{step.name}/{token}")
    record = Record(
        step=step.name,
        kind=step.kind,
        title=step.title,
        digest=step.digest,
        inputs=dict(inputs),
        identity=product.identity,
        facts=dict(product.facts),
        folder=token,
        files=files,
        seconds=how.seconds,
        attempt=how.attempt,
        host=how.host,
        device=product.device,
        created=how.created,
    ).sealed()
    text = json.dumps(record.model_dump(mode="json"), indent=2, ensure_ascii=False)
    name, content = f"{FOLDER}/{step.name}/{RECORD}", text.encode() + b"\n"
    if place.create(name, content):
        return record
    # Somebody was faster, and others may use that result already; or the existing one is faulty.
    before = load(place, step.name)
    if before is not None and before.inputs == dict(inputs) and not faults(place, before):
        place.remove(f"{FOLDER}/{step.name}/{token}")
        return before
    place.write(name, content)
    return record


def load(place: Place, step: str) -> Record | None:
    """A finished step's record, if there is one that can be read."""
    content = place.read(f"{FOLDER}/{step}/{RECORD}")
    return None if content is None else _parsed(content)


def load_all(place: Place, steps: Iterable[str]) -> dict[str, Record]:
    """Records of many steps; those without one are left out."""
    there = set(place.names(FOLDER))
    wanted = {f"{FOLDER}/{step}/{RECORD}": step for step in steps if step in there}
    read = place.read_all(wanted)
    found = {wanted[name]: _parsed(content) for name, content in read.items()}
    return {step: record for step, record in found.items() if record is not None}


def _parsed(content: bytes) -> Record | None:
    try:
        return Record.model_validate_json(content, strict=True)
    except (ValueError, ValidationError):
        return None


def faults(place: Place, record: Record, largest: int | None = SMALL) -> list[str]:
    """What is wrong with a result; files above `largest` bytes are judged by their size."""
    base = f"{FOLDER}/{record.step}"
    if not record.is_sound():
        return [f"{place.path_of(base)}/{RECORD} was changed after it was written"]
    sizes = place.sizes(f"{base}/{record.folder}", record.files)
    found = []
    for name, file in record.files.items():
        path = f"{base}/{record.folder}/{name}"
        if name not in sizes:
            found.append(f"{place.path_of(path)} is missing")
        elif sizes[name] != file.size_bytes:
            found.append(
                f"{place.path_of(path)} has {sizes[name]:,} bytes, not {file.size_bytes:,}"
            )
        elif (largest is None or file.size_bytes <= largest) and (
            _sha256(place, path) != file.sha256
        ):
            found.append(f"{place.path_of(path)} changed after it was written: its digest differs")
    return found


def _sha256(place: Place, name: str) -> str:
    if place.local is not None:
        return sha256_of(place.local / name)
    return hashlib.sha256(place.read(name) or b"").hexdigest()


def tidy(place: Place, record: Record) -> None:
    """Remove what killed attempts left next to a finished result."""
    base = f"{FOLDER}/{record.step}"
    beside = [name for name in place.names(base) if name not in (RECORD, record.folder)]
    now = load(place, record.step) if beside else None
    if now is None or now.folder != record.folder:  # another result counts by now
        return
    for name in beside:
        place.remove(f"{base}/{name}")


def forget(place: Place, step: str) -> None:
    """Remove a result: the record first, so that nobody takes a part for the whole."""
    place.remove(f"{FOLDER}/{step}/{RECORD}")
    place.remove(f"{FOLDER}/{step}")


def materialise(place: Place, record: Record, scratch: Path) -> Path:
    """A local folder with a result's files, every one checked by its digest."""
    base = f"{FOLDER}/{record.step}/{record.folder}"
    if place.local is not None:
        if wrong := faults(place, record, largest=None):
            raise Tampered(record.step, wrong[0])
        return place.local / base
    target = scratch / record.step
    for name, file in record.files.items():
        path = target / name
        if path.is_file() and sha256_of(path) == file.sha256:
            continue
        if not place.fetch(f"{base}/{name}", path):
            raise Tampered(record.step, f"{place.path_of(base)}/{name} is missing")
        if sha256_of(path) != file.sha256:
            raise Tampered(
                record.step,
                f"{place.path_of(base)}/{name} changed after it was written: its digest differs",
            )
    return target
