"""What a draft is worth in time: tokens a step against what the step costs.

A step drafts k tokens, one pass of the draft each, and the target checks all of them in one pass.
At few sequences a time both are bound by reading weights, so the default cost of a pass is the
bytes it reads, whatever the GPU. For a GPU and more sequences the roofline tells its seconds.
"""

from collections.abc import Callable, Sequence

from quantkit.advise import efficiency
from quantkit.advise.speed import Case, pass_seconds

Cost = Callable[[int], float]
"""Time of one pass over so many tokens of every sequence, in any unit that both models share."""


def reading(size_bytes: int) -> Cost:
    """A pass takes as long as its weights take to read, however few tokens it is for."""
    return lambda n_tokens: float(size_bytes)


def on_gpu(case: Case, users: int, depth: int) -> Cost:
    """Seconds by the roofline, where engines typically are below it."""
    end = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    return lambda n_tokens: pass_seconds(case, users, n_tokens, depth, end)


def speedups(tokens: Sequence[float], target: Cost, draft: Cost) -> list[float]:
    """Against the target alone, for k = 1, 2, ...; `tokens` a step for each k."""
    alone = target(1)
    return [made * alone / (k * draft(1) + target(k + 1)) for k, made in enumerate(tokens, start=1)]


def best(found: Sequence[float]) -> int:
    """The k with the largest speed-up; 0 where no draft at all is best."""
    k = max(range(len(found)), key=lambda i: found[i])
    return k + 1 if found[k] > 1 else 0
