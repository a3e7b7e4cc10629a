"""One row as its file has it, and what becomes of rows that cannot be read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.errors import DataError

MAX_ROW_BYTES = 1 << 28
"""Of one row, in its file. Longer than any document; a damaged or hostile file may hold more."""
MAX_DOCUMENT_BYTES = 1 << 30
"""Of a JSON document, which is read whole."""
SKIP = "`quantkit calibrate build --skip-bad` leaves it out"
"""Advice that holds whichever command reads the row."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row, before anybody knows what its fields mean."""

    place: str
    """Where it stands, for people: `traffic.jsonl:17`."""
    value: Any
    """A dict for a row with fields, a list for a bare list of messages, a str for plain text."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A row that was left out, and why."""

    place: str
    reason: str


OnBad = Callable[[Trouble], None]


def pass_over(trouble: Trouble) -> None:
    """Do nothing about a row that was left out."""


@dataclass
class Reading:
    """One file while it is read: names its rows and decides on bad ones."""

    path: str
    """As errors name it."""
    name: str
    """As the places of its rows name it."""
    skip_bad: bool = False
    on_bad: OnBad = pass_over
    n_bad: int = 0
    """How many rows were left out."""

    def bad(self, number: int, reason: str, unit: str = "line") -> None:
        """Report a row that cannot be read, or stop at it."""
        if not self.skip_bad:
            raise DataError(f"{self.path}, {unit} {number}: {reason}; {SKIP}")
        self.n_bad += 1
        self.on_bad(Trouble(f"{self.name}:{number}", reason))

    def bad_file(self, reason: str) -> None:
        """Report a file that holds nothing, or stop at it."""
        if not self.skip_bad:
            raise DataError(f"{self.path} {reason}; {SKIP}")
        self.on_bad(Trouble(self.name, f"the file {reason}"))
