"""Where a model is to be served, in the user's terms."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """GPUs of one kind, and the load."""

    gpu: str
    count: int = 1
    context: int | None = None
    """Tokens per user; None: 8192, or the model's maximum."""
    users: int = 1
