"""The processes that share one pass: sum, share and spread work.

Every rank streams the same blocks and runs its share of the samples. Statistics are summed, so that
all ranks hold those of all samples; the work on them is spread, and each result is sent to all.
`Ranks` itself is the case of a single process without communication, so that the pass reads the
same either way; `distributed.py` has the case of many.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """Work that one rank does for all."""

    cost: float
    """Relative to other jobs; every rank must compute the same value."""
    do: Callable[[], Any]
    take: Callable[[Any], None]
    """Receives on every rank what `do` returned on one."""


class Ranks:
    """A single process."""

    rank = 0
    size = 1
    local_size = 1
    """Ranks on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes, prints and keeps the journal."""
        return self.rank == 0

    def share(self, value: T | None, owner: int = 0) -> T:
        """The owner's value on every rank; what others pass is ignored. Tensors are sent too."""
        return value  # type: ignore[return-value]

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all ranks."""

    def max_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their maxima over all ranks; NaN becomes infinite."""

    def part(self) -> None:
        """Nothing more is shared: the first rank continues alone, and the others are done."""

    def spread(self, jobs: Sequence[Job]) -> None:
        """Do every job on one rank, and send its result to all, in the order of the jobs."""
        owners = assign([job.cost for job in jobs], self.size)
        made = {
            place: job.do()
            for place, (job, owner) in enumerate(zip(jobs, owners, strict=True))
            if owner == self.rank
        }
        everything: dict[int, Any] = {}
        for owner in sorted(set(owners)):
            everything |= self.share(made, owner)
        for place, job in enumerate(jobs):
            job.take(everything[place])

    def first_samples(
        self, n_samples: int, own: Callable[[int], torch.Tensor | None]
    ) -> torch.Tensor:
        """The first samples of all, where ranks hold every `size`-th; `own` returns a rank's first.

        The same samples, whatever the number of ranks.
        """
        owners = range(min(self.size, n_samples))
        parts: list[torch.Tensor] = [
            self.share(own(len(range(owner, n_samples, self.size))), owner)
            if owner == self.rank
            else self.share(None, owner)
            for owner in owners
        ]
        if len(parts) == 1:
            return parts[0]
        order = [parts[i % self.size][i // self.size] for i in range(n_samples)]
        return torch.stack(order)


def assign(costs: Sequence[float], n_ranks: int) -> list[int]:
    """Which rank does each job: the most expensive first, each to the least loaded rank."""
    load = [0.0] * n_ranks
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(n_ranks), key=lambda rank: (load[rank], rank))
        owners[place] = owner
        load[owner] += costs[place]
    return owners
