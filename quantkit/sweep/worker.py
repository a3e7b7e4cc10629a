"""Runs steps on a machine: fetch what they need, work, publish the results, keep a log."""

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quantkit.errors import PolicyError, QuantkitError
from quantkit.progress import Progress, Silent
from quantkit.storage import guarded
from quantkit.sweep import versions
from quantkit.sweep.bench import Bench
from quantkit.sweep.graph import Step
from quantkit.sweep.place import Place
from quantkit.sweep.result import (
    Circumstances,
    Product,
    Record,
    Tampered,
    materialise,
    publish,
)

LOGS = "logs"
ROOMS = "work"


@dataclass(frozen=True)
class Job:
    """Steps that one machine runs at once."""

    place: Place
    steps: tuple[Step, ...]
    inputs: Mapping[str, Record]
    """Records of all results that the steps take."""
    attempts: Mapping[str, int]
    """Which attempt this is, by step."""

    @property
    def kind(self) -> str:
        return self.steps[0].kind

    @property
    def title(self) -> str:
        """What the steps are about, in words."""
        first = f"{self.kind} {self.steps[0].title}"
        more = len(self.steps) - 1
        return f"{first} and {more} more" if more else first


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    records: tuple[Record, ...] = ()
    error: str = ""
    """Why it failed, in a sentence; the log has the rest."""
    tampered: str = ""
    """A step whose result was found to be changed."""
    died: bool = False
    """The machine or the process went away, which says nothing about the step."""
    final: bool = False
    """Retrying would end the same way."""
    host: str = ""


class Logged:
    """Passes progress on, and logs notes."""

    def __init__(self, listener: Progress, stream: IO[str] | None) -> None:
        self._listener, self._stream = listener, stream
        self.lines: list[str] = []

    def start(self, label: str, total: int, unit: str = "bytes") -> None:
        self.line(f"{label}: {total:,} {unit}")
        self._listener.start(label, total, unit)

    def advance(self, amount: int) -> None:
        self._listener.advance(amount)

    def finish(self) -> None:
        self._listener.finish()

    def status(self, text: str) -> None:
        self._listener.status(text)

    def note(self, text: str) -> None:
        self.line(text)
        self._listener.detail(text)

    def detail(self, text: str) -> None:
        self.line(text)
        self._listener.detail(text)

    def line(self, text: str) -> None:
        """One line of the log, with the time."""
        self.lines.append(f"{time.strftime('%H:%M:%S')} {text}\n")
        if self._stream is not None:
            with suppress(OSError):  # a full disk is reported by what the step itself writes
                self._stream.write(self.lines[-1])
                self._stream.flush()


Functions = Mapping[str, Callable[[Sequence[Step], Bench], list[Product]]]
"""The function that runs a step, by its kind."""


def log_name(step: str, attempt: int) -> str:
    """The path of an attempt's log."""
    return f"{LOGS}/{step}/{attempt}.log"


def execute(
    job: Job, listener: Progress | None = None, functions: Functions | None = None
) -> Outcome:
    """Run a job; whatever goes wrong in it is returned, not raised."""
    names = [log_name(step.name, job.attempts[step.name]) for step in job.steps]
    with _log(job.place, names[0], listener or Silent()) as log:
        log.line(f"{job.title}, on {socket.gethostname()}, process {os.getpid()}")
        try:
            outcome = _execute(job, log, functions)
            log.line("done")
        except Tampered as error:
            log.line(str(error))
            outcome = Outcome(error=str(error), tampered=error.step)
        except QuantkitError as error:
            log.line(str(error))
            outcome = Outcome(error=str(error), final=isinstance(error, PolicyError))
        except Exception as error:  # of any kind: a step's fault must not end the sweep
            log.line(traceback.format_exc())
            message = next(iter(str(error).splitlines()), "")
            outcome = Outcome(error=f"{type(error).__name__}: {message}".rstrip(": "))
    for name in names if job.place.local is None else names[1:]:
        job.place.write(name, "".join(log.lines).encode())
    return outcome


def _execute(job: Job, log: Logged, functions: Functions | None) -> Outcome:
    started = time.monotonic()
    if functions is None:  # planning and watching need no heavy imports
        from quantkit.sweep import work

        functions = work.KINDS
    for step in job.steps:
        versions.require(step.work.get("versions", {}))
    with _room(job) as room, tempfile.TemporaryDirectory(prefix="quantkit-") as fetched:

        def folder_of(step: str) -> Path:
            return materialise(job.place, job.inputs[step], Path(fetched))

        products = functions[job.kind](job.steps, Bench(folder_of, room, log))
        records = []
        for step, product in zip(job.steps, products, strict=True):
            how = Circumstances(
                seconds=(time.monotonic() - started) / len(products),
                attempt=job.attempts[step.name],
                host=socket.gethostname(),
                created=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            )
            inputs = {n: job.inputs[n].identity for n in step.needs if n in job.inputs}
            records.append(publish(job.place, step, product, inputs, how))
    return Outcome(tuple(records), host=socket.gethostname())


@contextmanager
def _log(place: Place, name: str, listener: Progress) -> Iterator[Logged]:
    """A log that is visible while it grows, where the storage allows it."""
    if place.local is None:
        yield Logged(listener, None)
        return
    path = place.local / name
    with guarded(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Append to what a killed driver's attempt of the same number left: that is worth reading.
        stream = path.open("a", encoding="utf-8", errors="replace")
    try:
        yield Logged(listener, stream)
    finally:
        with suppress(OSError):
            stream.close()


@contextmanager
def _room(job: Job) -> Iterator[Path]:
    """A working folder; that of a pass survives a kill, so that it can resume."""
    if job.place.local is None:
        with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
            yield Path(folder)
        return
    rooms = job.place.local / ROOMS
    with guarded(rooms):
        rooms.mkdir(parents=True, exist_ok=True)
        room = rooms / f"{job.kind}-{_key(job)}"
        lock = (rooms / f"{room.name}.lock").open("w")
    with lock:
        keep = job.kind == "quantize"
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # somebody who was thought dead is still working
            room, keep = Path(tempfile.mkdtemp(prefix=f"{job.kind}-", dir=rooms)), False
        if not keep:
            shutil.rmtree(room, ignore_errors=True)
        room.mkdir(exist_ok=True)
        try:
            yield room
        except Exception:
            keep = False  # what failed may fail again because of its leftovers
            raise
        else:
            keep = False
        finally:
            if not keep:
                shutil.rmtree(room, ignore_errors=True)


def _key(job: Job) -> str:
    digests = "".join(sorted(step.digest for step in job.steps))
    return hashlib.sha256(digests.encode()).hexdigest()[:12]
