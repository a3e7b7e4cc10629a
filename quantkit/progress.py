"""Progress reports of long-running work, independent of who listens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol


class Progress(Protocol):
    """Receives steps and notes; the command line draws them, tests and libraries ignore them."""

    def start(self, label: str, total: int, unit: str = "bytes") -> None:
        """Begin a stage of `total` units."""

    def advance(self, amount: int) -> None:
        """Report finished units of the current stage. May be called from any thread."""

    def finish(self) -> None:
        """End the current stage."""

    def status(self, text: str) -> None:
        """Describe the state of the current stage in a few words, replacing the previous ones."""

    def note(self, text: str) -> None:
        """Report something the user should know, in one sentence."""

    def detail(self, text: str) -> None:
        """Report something of interest only with `-v`."""


class Silent:
    """Ignores all progress."""

    def start(self, label: str, total: int, unit: str = "bytes") -> None: ...

    def advance(self, amount: int) -> None: ...

    def finish(self) -> None: ...

    def status(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...


@dataclass(frozen=True)
class Update:
    """What a progress callback receives."""

    stage: str
    """The current stage, such as `quantize`."""
    done: int
    total: int
    unit: str
    text: str = ""
    """A note for the user; empty if only the count changed."""


Listener = Progress | Callable[[Update], None]
"""What API functions accept as `progress`."""


class Callback(Silent):
    """Progress delivered to a single function."""

    def __init__(self, call: Callable[[Update], None]) -> None:
        self._call = call
        self._now = Update("", 0, 0, "")

    def start(self, label: str, total: int, unit: str = "bytes") -> None:
        self._update(stage=label, done=0, total=total, unit=unit)

    def advance(self, amount: int) -> None:
        self._update(done=self._now.done + amount)

    def finish(self) -> None:
        self._update(done=self._now.total)

    def note(self, text: str) -> None:
        self._update(text=text)

    def _update(self, **changed: Any) -> None:
        self._now = replace(self._now, text="") if "text" not in changed else self._now
        self._now = replace(self._now, **changed)
        self._call(self._now)


def listening(listener: Listener | None) -> Progress:
    """Progress for a listener, or a silent one."""
    if listener is None:
        return Silent()
    return Callback(listener) if callable(listener) else listener
