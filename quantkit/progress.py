"""How long work tells of its progress without knowing who listens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol


class Progress(Protocol):
    """Receives steps and notes; the command line draws them, tests and libraries ignore them."""

    def start(self, label: str, total: int, unit: str = "bytes") -> None:
        """A stage begins that has `total` units to do."""

    def advance(self, amount: int) -> None:
        """Some units of the present stage are done. May be called from any thread."""

    def finish(self) -> None:
        """The present stage is over."""

    def status(self, text: str) -> None:
        """How the present stage goes, in a few words; the next such words take their place."""

    def note(self, text: str) -> None:
        """Something a person should know, in one sentence."""

    def detail(self, text: str) -> None:
        """Something that only a curious person wants to know."""


class Silent:
    """Listens to nothing."""

    def start(self, label: str, total: int, unit: str = "bytes") -> None: ...

    def advance(self, amount: int) -> None: ...

    def finish(self) -> None: ...

    def status(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...


@dataclass(frozen=True)
class Update:
    """What a progress callback gets."""

    stage: str
    """What is being done, such as `quantize`."""
    done: int
    total: int
    unit: str
    text: str = ""
    """A note for people; empty where only the count changed."""


Listener = Progress | Callable[[Update], None]
"""What functions of the API take as `progress`."""


class Callback(Silent):
    """Progress as calls of one function."""

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
    """Progress for whoever listens, or for nobody."""
    if listener is None:
        return Silent()
    return Callback(listener) if callable(listener) else listener
