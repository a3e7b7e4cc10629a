"""How often a target accepts a draft's proposals, for the three ways in which engines draft.

With the target's distribution p and the draft's q after the same text:

- greedy drafts (vLLM's default): the draft's top token d is accepted with probability p(d);
- temperature 0: d is accepted if it is the target's top token too;
- sampled drafts: the draft samples from q, and is accepted with probability sum of min(p, q).

An accepted token changes what comes after it, so the probabilities along a step are not
independent: easy stretches are easy for several tokens. On text that the target itself generated
they can be computed exactly. Rejection sampling leaves the target's distribution unchanged, so such
text is distributed as if it had been generated with the draft, and given its next token x the
probability that x came from the draft is

    greedy drafts   1 if x is d, else 0
    temperature 0   the same, on text generated at temperature 0
    sampled drafts  min(1, q(x) / p(x))

Steps can then be followed along the text: each takes tokens until one did not come from the draft.
"""

from dataclasses import dataclass

import torch

MOST_DRAFTED = 8


@dataclass(frozen=True)
class Chances:
    """Acceptance probabilities at every position [rows, positions] for one drafting mode."""

    taken: torch.Tensor
    """Probability that a proposal made here is accepted."""
    followed: torch.Tensor
    """Probability that the token here was proposed and accepted, given that the target generated
    it.
    """

    @property
    def rate(self) -> float:
        """Mean acceptance of a proposal at any position."""
        return float(self.taken.mean())

    @property
    def stderr(self) -> float | None:
        """Standard error over rows, since positions of a text are correlated; None for one row."""
        rows = self.taken.mean(1)
        return float(rows.std() / len(rows) ** 0.5) if len(rows) > 1 else None


def greedy(p: torch.Tensor, q: torch.Tensor, text: torch.Tensor) -> Chances:
    """`p` and `q` are logits [..., vocabulary], `text` the tokens at these positions [...]."""
    top = q.argmax(-1, keepdim=True)
    taken = p.softmax(-1).gather(-1, top)[..., 0]
    return Chances(taken.double(), (text == top[..., 0]).double())


def temperature_zero(p: torch.Tensor, q: torch.Tensor, text: torch.Tensor) -> Chances:
    top = q.argmax(-1)
    return Chances((p.argmax(-1) == top).double(), (text == top).double())


def sampled(p: torch.Tensor, q: torch.Tensor, text: torch.Tensor) -> Chances:
    p, q = p.softmax(-1), q.softmax(-1)
    taken = torch.minimum(p, q).sum(-1).clamp_(max=1.0)
    ours, theirs = (d.gather(-1, text[..., None])[..., 0].double() for d in (p, q))
    return Chances(taken.double(), (theirs / ours.clamp_(min=1e-30)).clamp_(max=1.0))


@dataclass(frozen=True)
class Steps:
    """Outcome of drafting k tokens per step."""

    tokens: float
    """Tokens per step: those accepted, plus the one that the target adds."""
    accepted: float
    """Share of proposed tokens that are accepted, as engines report it."""
    at: tuple[float, ...]
    """Share of steps in which the first, second, ... proposal was accepted."""


def follow(chances: torch.Tensor, k: int) -> Steps:
    """Follow steps of k proposals along rows of probabilities [rows, positions], in expectation.

    Every row begins with a step. Steps that could reach beyond the end of a row are not counted.
    """
    n_rows, n_positions = chances.shape
    if n_positions < k + 1:
        raise ValueError(f"rows of {n_positions} positions are too short for steps of {k}")
    begins = torch.zeros(n_rows, n_positions + k + 2, dtype=torch.float64)
    begins[:, 0] = 1.0
    n_steps = 0.0
    accepted = [0.0] * k
    for place in range(n_positions - k):
        reached = begins[:, place].clone()
        n_steps += float(reached.sum())
        for i in range(k):
            chance = chances[:, place + i].double()
            begins[:, place + i + 1] += reached * (1 - chance)
            reached = reached * chance
            accepted[i] += float(reached.sum())
        begins[:, place + k + 1] += reached
    at = tuple(share / n_steps for share in accepted)
    return Steps(1 + sum(at), sum(at) / k, at)
