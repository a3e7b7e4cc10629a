"""What a deployment is to be like beside its plan: how many servers, and what users can bear."""

import re
from dataclasses import dataclass

from quantkit.errors import UsageError

SLOW_TTFT = 1.0
"""Seconds to a first token that are worth an alert, where nobody says."""
MOST_REPLICAS = 1000


@dataclass(frozen=True)
class Targets:
    """Seconds that users can bear; alerts and thresholds of panels are these."""

    ttft: float = SLOW_TTFT
    """To a first token."""
    tpot: float | None = None
    """Between two tokens."""


@dataclass(frozen=True)
class Fleet:
    """Servers of one plan."""

    least: int = 1
    """Kept running whatever comes: the warm pool."""
    most: int = 1
    targets: Targets = Targets()
    image: str | None = None
    """In place of the usual one."""
    is_scaled: bool = False
    """Whether a number of replicas was asked for."""
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    """Where KEDA asks for metrics: the name that the Prometheus operator gives its service."""
    gateway: str = "inference-gateway"
    """The Gateway that routes are attached to."""


def replicas(text: str | None) -> tuple[int, int]:
    """`3` or `1-4` as the least and the most."""
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= MOST_REPLICAS:
        raise UsageError(
            f"--replicas takes a number or a range such as 1-4, from 1 on, not '{text}'"
        )
    return least, most
