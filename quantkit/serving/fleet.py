"""Deployment settings besides the plan: the number of servers, and latency targets."""

import re
from dataclasses import dataclass

from quantkit.errors import UsageError

SLOW_TTFT = 1.0
"""Default time to first token, in seconds, that triggers an alert."""
MOST_REPLICAS = 1000


@dataclass(frozen=True)
class Targets:
    """Latency targets in seconds, used for alerts and for the thresholds of panels."""

    ttft: float = SLOW_TTFT
    """Time to first token."""
    tpot: float | None = None
    """Time between two tokens."""


@dataclass(frozen=True)
class Fleet:
    """Servers of one plan."""

    least: int = 1
    """Always kept running: the warm pool."""
    most: int = 1
    targets: Targets = Targets()
    image: str | None = None
    """Replaces the default image."""
    is_scaled: bool = False
    """Whether a number of replicas was requested."""
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    """Where KEDA queries metrics: the name that the Prometheus operator gives its service."""
    gateway: str = "inference-gateway"
    """The Gateway that routes are attached to."""


def replicas(text: str | None) -> tuple[int, int]:
    """Parse `3` or `1-4` as minimum and maximum."""
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise UsageError(
            f"--replicas takes a number or a range such as 1-4, from 1 on, not '{text}'"
        )
    return least, most
