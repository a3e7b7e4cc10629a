"""Speed-up from a draft: tokens per step against the cost of a step.

A step drafts k tokens, one draft pass each, and the target checks all of them in one pass. With few
concurrent sequences both are bound by reading weights, so the default cost of a pass is the bytes
it reads, whatever the GPU. For a given GPU and more sequences, the roofline predicts seconds, and
no step is shorter than the CPU takes to prepare it, plus an overhead for each draft pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quantkit.advise import efficiency
from quantkit.advise.speculation import OF_A_DRAFT
from quantkit.advise.speed import Case, gpu_seconds, host_seconds

Cost = Callable[[int], float]
"""Time of one pass over this many tokens per sequence, in any unit that both models share."""


@dataclass(frozen=True)
class Costs:
    """Costs of one pass of the target and one of its draft."""

    target: Cost
    draft: Cost
    at_least: float = 0.0
    """Lower bound for a step of the target alone."""


def reading(size_bytes: int) -> Cost:
    """A pass takes as long as reading its weights, however few tokens it processes."""
    return lambda n_tokens: float(size_bytes)


def on_gpu(case: Case, users: int, depth: int) -> Cost:
    """Seconds from the roofline, at the efficiency engines typically reach."""
    end = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    return lambda n_tokens: gpu_seconds(case, users, n_tokens, depth, end)


def shortest(case: Case, users: int) -> float:
    """Lower bound in seconds for any step, set by the CPU's preparation."""
    end = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    return host_seconds(case, users, end)


def speedups(tokens: Sequence[float], costs: Costs) -> list[float]:
    """Speed-ups over the target alone for k = 1, 2, ...; `tokens` per step for each k."""
    alone = max(costs.target(1), costs.at_least)
    found = []
    for k, made in enumerate(tokens, start=1):
        step = k * costs.draft(1) + costs.target(k + 1)
        found.append(made * alone / max(step, (1 + OF_A_DRAFT * k) * costs.at_least))
    return found


def best(found: Sequence[float]) -> int:
    """The k with the largest speed-up; 0 if not drafting is best."""
    k = max(range(len(found)), key=lambda i: found[i])
    return k + 1 if found[k] > 1 else 0
