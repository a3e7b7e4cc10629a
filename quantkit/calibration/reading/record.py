"""One row as stored in its file, and the handling of unreadable rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quantkit.errors import DataError

MAX_ROW_BYTES = 1 << 28
"""Most bytes of a row in its file. Longer than any document; a damaged or hostile file may hold
more.
"""
MAX_DOCUMENT_BYTES = 1 << 30
"""Most bytes of a JSON document, which is read whole."""
SKIP = "`quantkit calibrate build --skip-bad` leaves it out"
"""Advice that is valid whichever command reads the row."""


@dataclass(frozen=True, slots=True)
class Record:
    """One row, before its fields are interpreted."""

    place: str
    """Its location for display: `traffic.jsonl:17`."""
    value: Any
    """A dict for a row with fields, a list for a bare list of messages, a str for plain text."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A row that was left out, and why."""

    place: str
    reason: str


OnBad = Callable[[Trouble], None]


def pass_over(trouble: Trouble) -> None:
    """Ignore a row that was left out."""


@dataclass
class Reading:
    """One file while it is read: names its rows and handles bad ones."""

    path: str
    """Its name in errors."""
    name: str
    """Its name in the places of its rows."""
    skip_bad: bool = False
    on_bad: OnBad = pass_over
    n_bad: int = 0
    """Number of rows left out."""

    def bad(self, number: int, reason: str, unit: str = "line") -> None:
        """Report a row that cannot be read, or stop at it."""
        if not self.skip_bad:
            raise DataError(f"{self.path}, {unit} {number}: {reason}; {SKIP}")
        self.n_bad += 1
        self.on_bad(Trouble(f"{self.name}:{number}", reason))

    def bad_file(self, reason: str) -> None:
        """Report a file without content, or stop at it."""
        if not self.skip_bad:
            raise DataError(f"{self.path} {reason}; {SKIP}")
        self.on_bad(Trouble(self.name, f"the file {reason}"))
