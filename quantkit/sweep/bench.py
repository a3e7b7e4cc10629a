"""What a step of a sweep works with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.progress import Progress


@dataclass(frozen=True)
class Bench:
    """What a step works with: results that it needs, room for its own, somebody who listens."""

    folder_of: Callable[[str], Path]
    """A finished step's files by its name, checked."""
    room: Path
    """An own folder; what a killed attempt left may be there."""
    progress: Progress
