"""Arrival of requests: in a closed loop, at a rate, or from a trace.

A closed loop keeps a number of users busy, each waiting for an answer before the next request; it
shows capacity. In an open loop requests arrive whether the server keeps up or not; it shows
queueing.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from quantkit.bench.request import Request
from quantkit.errors import DataError

Kind = Literal["closed", "poisson", "constant", "trace", "batch"]


@dataclass(frozen=True)
class Load:
    """The load on a server."""

    kind: Kind
    concurrency: int | None = None
    """Users of a closed loop, or requests of one batch."""
    rate: float | None = None
    """Requests per second of an open loop."""

    @property
    def name(self) -> str:
        """A short name for tables."""
        if self.kind == "batch":
            return f"batch of {self.concurrency}"
        if self.kind == "closed":
            return f"{self.concurrency} user{'' if self.concurrency == 1 else 's'}"
        if self.kind == "trace":
            return "trace"
        return f"{self.rate:g}/s" if self.kind == "poisson" else f"{self.rate:g}/s even"

    def n_requests(self) -> int:
        """Default number of requests: a few rounds, or half a minute."""
        if self.concurrency is not None:
            return max(16, 4 * self.concurrency)
        return max(64, round(30 * (self.rate or 0)))

    def times(self, requests: Sequence[Request], seed: int) -> list[float] | None:
        """Seconds after the start at which each request is due; None for a closed loop."""
        if self.rate is not None:
            return at_rate(self.kind == "poisson", self.rate, len(requests), seed)
        if self.kind != "trace":
            return None
        times = [request.at for request in requests if request.at is not None]
        if len(times) != len(requests):
            raise DataError(
                f"the trace has arrival times for {len(times)} of the {len(requests)} requests; "
                "ask for no more with --requests, or give --rate or --concurrency"
            )
        return [time - min(times) for time in times]


def at_rate(random_gaps: bool, rate: float, n: int, seed: int) -> list[float]:
    """Arrivals at a rate, the first at time 0: evenly spaced, or a Poisson process."""
    draw = random.Random(seed)
    gaps = [draw.expovariate(rate) if random_gaps else 1 / rate for _ in range(n - 1)]
    return list(accumulate(gaps, initial=0.0))[:n]
