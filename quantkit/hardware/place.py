"""Where a model is to be served, in the user's terms."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """GPUs of one kind, the load, and what a recipe for them is chosen by."""

    gpu: str
    count: int = 1
    context: int | None = None
    """Tokens per user; None: 8192, or the model's maximum."""
    users: int | None = None
    """None: one, or as many as fit if the objective is throughput."""
    objective: str = "latency"
    min_quality: float | None = None
    """Share of the source's accuracy to keep; None: the default."""
    report: Path | None = None
    """A report of the model, whose scores replace published figures."""
