"""Where a model is to be served, as people say it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """GPUs of one kind, and who comes."""

    gpu: str
    count: int = 1
    context: int | None = None
    """Tokens that a user needs; None: 8192, or all that the model takes."""
    users: int = 1
