"""What a draft is worth in time: tokens a step against what the step costs.

A step drafts k tokens, one pass of the draft each, and the target checks all of them in one pass.
At few sequences a time both are bound by reading weights, so the default cost of a pass is the
bytes it reads, whatever the GPU. For a GPU and more sequences the roofline tells its seconds, and
no step is shorter than the CPU takes to prepare it, with more for each pass of the draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.advise import efficiency
from quantkit.advise.speculation import OF_A_DRAFT
from quantkit.advise.speed import Case, gpu_seconds, host_seconds

Cost = Callable[[int], float]
"""Time of one pass over so many tokens of every sequence, in any unit that both models share."""


@dataclass(frozen=True)
class Costs:
    """Of a pass of the target and of one of its draft."""

    target: Cost
    draft: Cost
    at_least: float = 0.0
    """No step of the target alone is shorter."""


def reading(size_bytes: int) -> Cost:
    """A pass takes as long as its weights take to read, however few tokens it is for."""
    return lambda n_tokens: float(size_bytes)


def on_gpu(case: Case, users: int, depth: int) -> Cost:
    """Seconds by the roofline, where engines typically are below it."""
    end = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    return lambda n_tokens: gpu_seconds(case, users, n_tokens, depth, end)


def shortest(case: Case, users: int) -> float:
    """Seconds below which no step comes, as the CPU has to prepare it."""
    end = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    return host_seconds(case, users, end)


def speedups(tokens: Sequence[float], costs: Costs) -> list[float]:
    """Against the target alone, for k = 1, 2, ...; `tokens` a step for each k."""
    alone = max(costs.target(1), costs.at_least)
    found = []
    for k, made in enumerate(tokens, start=1):
        step = k * costs.draft(1) + costs.target(k + 1)
        found.append(made * alone / max(step, (1 + OF_A_DRAFT * k) * costs.at_least))
    return found


def best(found: Sequence[float]) -> int:
    """The k with the largest speed-up; 0 where no draft at all is best."""
    k = max(range(len(found)), key=lambda i: found[i])
    return k + 1 if found[k] > 1 else 0
