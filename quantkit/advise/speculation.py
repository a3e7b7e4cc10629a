"""Value of a draft for a format on a GPU: tokens per step against the time of a step.

A step drafts k tokens, one pass of the draft each, and the target checks all of them in one pass.
Acceptance is a property of the two models, which `quantkit draft` measures; the time of the passes
comes from the roofline.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.advise import efficiency
from quantkit.advise import speed as speeds
from quantkit.advise.efficiency import Efficiency
from quantkit.advise.speed import Case, Load, Speed
from quantkit.errors import AdviceError, UsageError
from quantkit.parsing import parse_json

MOST_DRAFTED = 8
OF_A_DRAFT = 0.5
"""CPU time that each draft pass adds, relative to that of a step. Assumed."""
SAMPLINGS = {"greedy": "greedy", "probabilistic": "sampled"}
"""vLLM's names for how a draft proposes, and those of `quantkit draft`."""

Pass = Callable[[Case, int, int, Efficiency], float]
"""Seconds in which a draft proposes one token for this many users at a depth, beside a target."""


@dataclass(frozen=True)
class Acceptance:
    """How much of a draft a target accepts."""

    tokens: tuple[float, ...]
    """Tokens per step, the target's own included, with 1, 2, ... drafted tokens."""
    rate: float
    sampling: str = "greedy"
    """One of SAMPLINGS."""
    source: str = "as given"

    @classmethod
    def of_rate(cls, rate: float, sampling: str = "greedy") -> "Acceptance":
        """The same acceptance probability for every drafted token."""
        if not 0 < rate < 1:
            raise UsageError(f"--acceptance {rate:g} is not a share between 0 and 1")
        steps = (sum(rate**n for n in range(k + 1)) for k in range(1, MOST_DRAFTED + 1))
        return cls(tuple(steps), rate, sampling)


def acceptance(text: str, sampling: str | None = None) -> Acceptance:
    """The value of --acceptance: a share, or the output of `quantkit draft --json`.

    If no sampling is given, the better of the engine's two is used.
    """
    try:
        return Acceptance.of_rate(float(text), sampling or "greedy")
    except ValueError:
        pass
    path = Path(text)
    try:
        ways = parse_json(path.read_bytes())["ways"]
        found = {
            name: Acceptance(
                tuple(float(step["tokens"]) for step in ways[theirs]["steps"]),
                float(ways[theirs]["acceptance"]),
                name,
                str(path),
            )
            for name, theirs in SAMPLINGS.items()
        }
    except OSError as error:
        raise UsageError(
            f"--acceptance {text} is neither a share such as 0.7 nor a file: {error.strerror}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise AdviceError(
            f"{text} has no acceptance rates; give the output of `quantkit draft --json`"
        ) from error
    if sampling is not None:
        return found[sampling]
    return max(found.values(), key=lambda one: one.rate)


@dataclass(frozen=True)
class Speculation:
    """A draft, as far as speed depends on it."""

    acceptance: Acceptance
    draft: Pass
    n_tokens: int | None = None
    """Tokens drafted per step; None: the best number."""


def estimate(case: Case, load: Load, speculation: Speculation) -> Speed:
    """The speed of a case under a load with a draft."""
    depth = load.prompt + load.answer // 2
    typical = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    tokens = speculation.acceptance.tokens
    known: dict[tuple[int, Efficiency], float] = {}

    def draft(case: Case, users: int, depth: int, end: Efficiency) -> float:
        if (users, end) not in known:  # the same for every number of drafted tokens
            known[users, end] = speculation.draft(case, users, depth, end)
        return known[users, end]

    def seconds_a_token(k: int, users: int, end: Efficiency) -> float:
        return step_seconds(case, users, depth, end, draft, k) / tokens[k - 1]

    n = speculation.n_tokens
    if n is not None and n > len(tokens):
        raise AdviceError(
            f"the acceptance of {n} drafted tokens is not known, only up to {len(tokens)}"
        )
    choices = [n] if n else range(1, len(tokens) + 1)
    best = min(choices, key=lambda k: seconds_a_token(k, load.users, typical))
    alone = speeds.step_seconds(case, load.users, depth, typical)
    found = speeds.estimate(
        case, load, lambda case, users, depth, end: seconds_a_token(best, users, end)
    )
    gain = alone / seconds_a_token(best, load.users, typical)
    return replace(found, drafted=best, gain=gain)


def step_seconds(
    case: Case, users: int, depth: int, end: Efficiency, draft: Pass, n_drafted: int
) -> float:
    """A step that drafts and checks this many tokens for every user."""
    together = min(users, end.together)
    drafting = n_drafted * draft(case, together, depth, end)
    checking = speeds.gpu_seconds(case, together, n_drafted + 1, depth, end)
    host = (1 + OF_A_DRAFT * n_drafted) * speeds.host_seconds(case, together, end)
    longest = max(drafting + checking, host)
    return longest if together == users else longest * users / together
