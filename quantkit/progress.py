"""How long work tells of its progress without knowing who listens."""

from typing import Protocol


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
