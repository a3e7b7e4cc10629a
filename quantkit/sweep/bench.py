"""The environment of a sweep's step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantkit.progress import Progress


@dataclass(frozen=True)
class Bench:
    """What a step works with: the results it needs, a folder for its own, and progress
    reporting.
    """

    folder_of: Callable[[str], Path]
    """A finished step's files by its name, checked."""
    room: Path
    """Its own folder; it may contain leftovers of a killed attempt."""
    progress: Progress
