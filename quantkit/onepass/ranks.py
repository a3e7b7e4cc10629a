"""The processes that share one pass: add this up, share that, spread these jobs.

Every rank streams the same blocks and runs its share of the samples. What each has seen is added
up, so that all hold the statistics of all samples; the work on these is spread, and what one rank
makes is given to all. `Ranks` itself is the case of one process, with nobody to talk to, so that
the pass reads the same either way; `together.py` has the case of many.
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
    """Compared with that of other jobs; every rank must find the same."""
    do: Callable[[], Any]
    take: Callable[[Any], None]
    """Receives on every rank what `do` gave on one."""


class Ranks:
    """A process that is alone."""

    rank = 0
    size = 1
    local_size = 1
    """Ranks on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this one writes, prints and keeps the journal."""
        return self.rank == 0

    def share(self, value: T | None, owner: int = 0) -> T:
        """The owner's value on every rank; what others pass is ignored. Tensors go along."""
        return value  # type: ignore[return-value]

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their sums over all ranks."""

    def max_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their maxima over all ranks; what is not a number becomes infinite."""

    def part(self) -> None:
        """Nothing more is shared: the first goes on alone, and the others have done their work."""

    def spread(self, jobs: Sequence[Job]) -> None:
        """Do every job on one rank, and give its result to all, in the order of the jobs."""
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
        """The first samples of all, where ranks hold every `size`-th; `own` gives a rank's first.

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
    """Which rank does each job: the dearest first, each to the rank that has least to do."""
    load = [0.0] * n_ranks
    owners = [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(n_ranks), key=lambda rank: (load[rank], rank))
        owners[place] = owner
        load[owner] += costs[place]
    return owners
