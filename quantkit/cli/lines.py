"""Progress without a terminal, as in a build log: lines, never a bar.

A short stage is one line when it is over. A longer one prints a line when it begins, then from time
to time how far it is, and at its end how long it took.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from quantkit.storage import duration, gib

SOON = 2.0
"""Seconds after which a stage announces itself: many are over before."""
OFTEN = 30.0
"""Shortest pause between two lines of a stage, in seconds."""
SELDOM = 300.0
"""Longest pause: a stage of hours needs no line every half minute."""
LONGEST_STATUS = 200
"""In characters: a log has room for the whole names of a layer and a recipe."""
LONGEST_OF_A_WAIT = 90
"""A wait shows the last line of another program's log, of any length."""


@dataclass
class Stage:
    """State of one stage."""

    label: str
    total: int
    unit: str
    began: float
    done: int = 0
    status: str = ""
    announced: bool = False
    told_at: float = 0.0

    @property
    def is_wait(self) -> bool:
        """Whether it may end at any moment; its total is then the longest time it may take."""
        return self.unit == "s"

    @property
    def is_done(self) -> bool:
        return self.is_wait or self.total <= 1 or self.done >= self.total

    def opening(self) -> str:
        if self.is_wait:
            return f"{self.label}: at most {duration(self.total)}"
        return f"{self.label}: {self._amount(self.total)}" if self.total > 1 else self.label

    def middle(self, now: float) -> str:
        passed = now - self.began
        if self.is_wait or self.total <= 1:
            progress = duration(passed)
        else:
            progress = f"{self._count(self.done)} of {self._amount(self.total)}, {duration(passed)}"
            if 0 < self.done < self.total:
                progress += f", about {duration(passed * (self.total / self.done - 1))} left"
        status, longest = self.status, LONGEST_OF_A_WAIT if self.is_wait else LONGEST_STATUS
        if len(status) > longest:
            status = f"{status[: longest - 1]}…"
        return f"{self.label}: {progress}" + (f"; {status}" if status else "")

    def closing(self, now: float) -> str:
        seconds = now - self.began
        passed = f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
        if self.is_wait or self.total <= 1:
            return f"{self.label}: {passed}"
        if self.done >= self.total:
            return f"{self.label}: {self._amount(self.done)} in {passed}"
        far = f"{self._count(self.done)} of {self._amount(self.total)}"
        return f"{self.label}: ended at {far}, after {passed}"

    def pause(self, now: float) -> float:
        """Seconds from one line to the next."""
        return min(SELDOM, max(OFTEN, (now - self.began) / 20))

    def _amount(self, n: int) -> str:
        return gib(n) if self.unit == "bytes" else f"{n:,} {self.unit}"

    def _count(self, n: int) -> str:
        return gib(n) if self.unit == "bytes" else f"{n:,}"


class Lines:
    """Reports stages as lines, including long silent ones."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._stage: Stage | None = None
        self._lock = threading.RLock()
        self._over: threading.Event | None = None

    def start(self, label: str, total: int, unit: str) -> None:
        self.finish()
        with self._lock:
            self._stage = Stage(label, total, unit, began=self._clock())
            self._over = threading.Event()
            threading.Thread(target=self._watch, args=(self._over,), daemon=True).start()

    def advance(self, amount: int) -> None:
        with self._lock:
            if self._stage is not None:
                self._stage.done += amount

    def status(self, text: str) -> None:
        with self._lock:
            if self._stage is not None:
                self._stage.status = text

    def note(self, text: str) -> None:
        """Print a note, after the line that announces its stage."""
        with self._lock:
            if self._stage is not None:
                self._announce(self._stage)
            self._write(text)

    def finish(self) -> None:
        with self._lock:
            if self._over is not None:
                self._over.set()
            # One that fails at once needs no line: an error follows.
            if self._stage is not None and (self._stage.announced or self._stage.is_done):
                self._write(self._stage.closing(self._clock()))
            self._stage = self._over = None

    def look(self) -> None:
        """Print what is due."""
        with self._lock:
            stage, now = self._stage, self._clock()
            if stage is None or now - stage.began < SOON:
                return
            if not stage.announced:
                self._announce(stage)
            elif now - stage.told_at >= stage.pause(now):
                stage.told_at = now
                self._write(stage.middle(now))

    def _announce(self, stage: Stage) -> None:
        if not stage.announced:
            stage.announced, stage.told_at = True, self._clock()
            self._write(stage.opening())

    def _watch(self, over: threading.Event) -> None:
        """Runs in a thread of its own: the work itself may be silent for minutes."""
        while not over.wait(SOON / 2):
            with self._lock:
                if not over.is_set():
                    self.look()
