"""How often a target accepts what a draft proposes, for the three ways in which engines draft.

With the target's distribution p and the draft's q after the same text:

- greedy drafts (vLLM's default): the draft's top token d is taken with probability p(d);
- temperature 0: d is taken if it is the target's top token too;
- sampled drafts: the draft draws from q, and sum of min(p, q) is accepted.

An accepted token changes what comes after it, so chances along a step are not independent: easy
stretches are easy for some tokens. On text that the target itself wrote this can be had exactly.
Rejection sampling leaves the target's distribution unchanged, so such a text is as if written with
the draft at hand, and given its next token x the chance that x came from the draft is

    greedy drafts   1 if x is d, else 0
    temperature 0   the same, on text written at temperature 0
    sampled drafts  min(1, q(x) / p(x))

Steps can then be followed along the text: each takes tokens until one did not come from the draft.
"""

from dataclasses import dataclass

import torch

MOST_DRAFTED = 8


@dataclass(frozen=True)
class Chances:
    """Of every position [rows, positions], in one of the ways."""

    taken: torch.Tensor
    """A proposal made here is accepted."""
    followed: torch.Tensor
    """The token that stands here was proposed and accepted, given that the target wrote it."""

    @property
    def rate(self) -> float:
        """Of a proposal anywhere."""
        return float(self.taken.mean())

    @property
    def stderr(self) -> float | None:
        """Over rows, since positions of one text are alike; one row tells nothing of it."""
        rows = self.taken.mean(1)
        return float(rows.std() / len(rows) ** 0.5) if len(rows) > 1 else None


def greedy(p: torch.Tensor, q: torch.Tensor, text: torch.Tensor) -> Chances:
    """Logits of both [..., vocabulary] and the tokens that stand there [...]."""
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
    """What comes of drafting k tokens a step."""

    tokens: float
    """Per step: accepted ones, and the one that the target adds."""
    accepted: float
    """Share of proposed tokens that are accepted, as engines report it."""
    at: tuple[float, ...]
    """Share of steps in which the first, second, ... proposal was accepted."""


def follow(chances: torch.Tensor, k: int) -> Steps:
    """Follow steps of k proposals along rows of chances [rows, positions], by their expectation.

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
