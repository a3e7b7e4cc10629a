"""A child process in another environment: output captured, whole process group always stopped.

Engines start processes of their own, hold GPUs while they die, and hang. So each gets a process
group, its output goes to a file, and leaving the `with` block stops the group: SIGTERM first, then
SIGKILL. If this process itself is killed, the system stops the child (Linux).
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from quantkit.engine.causes import decisive_line, explain
from quantkit.errors import EngineError

PATIENCE = 20.0
"""Seconds between SIGTERM and SIGKILL."""
TAIL = 64 * 1024
PROC = Path("/proc")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Child:
    """A running program; use it in a `with` block."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        name: str = "the engine",
    ) -> None:
        self.command = list(command)
        self.name = name
        self._environment = {**os.environ, **(environment or {})}
        self._scratch = None if log else tempfile.TemporaryDirectory(prefix="quantkit-engine-")
        self.log = log or Path(self._scratch.name if self._scratch else "") / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Child":
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                    preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                self._forget()
                raise EngineError(
                    f"{self.name} cannot be started: {self.command[0]}: {error.strerror}"
                ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self._forget()

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._running().poll()

    def is_over(self, timeout: float) -> bool:
        """Whether it has ended, or does so within some seconds."""
        try:
            self._running().wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def words(self, lines: int = 12) -> list[str]:
        """The last lines of its output."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL))
            text = log.read().decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]

    def output(self) -> str:
        """Its whole output."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def check(self) -> None:
        """If it is dead, raise with its last lines and their explanation."""
        if self.code is not None:
            raise self.failure(f"{self.name} ended with {_ending(self.code)}")

    def wait(self, timeout: float) -> str:
        """Its output once it exits with 0; raises if it fails or exceeds the timeout."""
        try:
            code = self._running().wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.end()
            raise self.failure(f"{self.name} did not end within {timeout:.0f} s") from error
        if code != 0:
            raise self.failure(f"{self.name} ended with {_ending(code)}")
        return self.output()

    def failure(self, what: str) -> EngineError:
        """An error with the last lines, and an explanation if the cause is known."""
        words = self.output()
        meaning, line = explain(words), decisive_line(words)
        last = self.words()
        parts = [f"{what}."]
        if meaning:
            parts.append(meaning)
        if line and not (last and line.strip() in last[-1]):
            rest = [shown for shown in last if line.strip() not in shown]
            last = [line.strip(), "...", *rest[-len(rest) // 2 :]]
        if last:
            parts.append("Its last lines:\n  " + "\n  ".join(last))
        return EngineError(" ".join(parts))

    def end(self) -> None:
        """Stop the whole group: SIGTERM, wait, SIGKILL."""
        process = self._running()
        if _group_lives(process):
            _tell(process, signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE
            try:
                while _group_lives(process) and time.monotonic() < deadline:
                    time.sleep(0.05)
            finally:  # a second Ctrl-C means: do not wait
                _tell(process, signal.SIGKILL)
        process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("enter the child first")
        return self._process

    def _forget(self) -> None:
        if self._scratch:
            self._scratch.cleanup()


def run(
    command: Sequence[str],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    name: str = "the engine",
) -> str:
    """Run a program to its end and return its output. Raises if it fails or hangs."""
    with Child(command, environment=environment, log=log, name=name) as child:
        return child.wait(timeout)


def _group_lives(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # a leader that was not reaped counts as alive
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    # Zombies stay until their new parent reaps them, which can take long in a container.
    return any(state != "Z" for state in _states(process.pid))


def _states(group: int) -> list[str]:
    """Process states of a group from /proc; `R` where there is no /proc."""
    if not PROC.is_dir():
        return ["R"]
    found = []
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):  # it may exit while we look
            state, _, number = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            found += [state] if int(number) == group else []
    return found


def _tell(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):  # most real-time signals have no name
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
