"""What people ask for, by command or from Python: one typed object for each call of a stage.

`ready` refuses what is wrong and shows without torch, which takes seconds to load, and gives the
work; that takes a `Progress` and returns the result. Nothing here prints or exits, and building a
call loads nothing heavy.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from quantkit.progress import Progress

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Tell = Callable[[str], None]
"""Takes a sentence for people, before there is any progress to report."""
Work = Callable[[Progress], T]


class Call(Protocol[T_co]):
    """One call of a stage."""

    @property
    def needs_hub(self) -> bool:
        """Whether something that is named has to come from a hub."""

    @property
    def needs_transformers(self) -> bool:
        """Whether the work loads models."""

    def ready(self, tell: Tell) -> "Work[T_co]":
        """Refuse what can be refused at once; what is returned does the work."""


def silent(sentence: str) -> None:
    """Nobody wants to know."""
