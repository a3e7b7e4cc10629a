"""Requests from the command line or from Python: one typed object per stage call.

`ready` validates everything that can be validated without torch, which takes seconds to load, and
returns the work: a function that takes a `Progress` and returns the result. Nothing here prints or
exits, and building a call loads nothing heavy.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from quantkit.progress import Progress

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Notify = Callable[[str], None]
"""Receives a sentence for the user, before there is any progress to report."""
Work = Callable[[Progress], T]


class Call(Protocol[T_co]):
    """One call of a stage."""

    @property
    def needs_hub(self) -> bool:
        """Whether something it names must be downloaded from a hub."""

    @property
    def needs_transformers(self) -> bool:
        """Whether the work loads models."""

    def ready(self, notify: Notify) -> "Work[T_co]":
        """Validate what can be validated at once; the returned function does the work."""


def silent(sentence: str) -> None:
    """Discards the sentence."""
