"""Whose answers are these: the checkpoint's, or those of the source it was made from?

Agreement within rounding does not say. Where a format rounds activations, the rounding explains as
much as quantisation changes, and an engine that serves the unquantised source agrees too.

So both models are compared with the answers, each with the rounding that it has in the engine's
dtype, and the one that makes the answers likelier is the one that is served. Differences are
assumed to be Laplace distributed, with the mean of our own rounding as their scale:

    log-likelihood ratio = sum over tokens of |e - s| / b_s - |e - c| / b_c + log(b_s / b_c)

with e the engine's log-probability, c and s the references' in float32, b_c and b_s the mean gap
between float32 and the engine's dtype, both enlarged where the engine rounds more. Plain distance
is not enough: rounded activations are chaotic, and an honest FP8 engine may well be closer to the
source in nats than to our reference of the same checkpoint. What gives the source away is that it
is *too* close to itself.

Tokens on which both references agree add nothing, so no selection is needed; taking only those that
differ most lowers the power. The power is computed from the same references: the source's own
answers in the engine's dtype, with their rounding enlarged to the engine's, are resampled by
stretches of text, and the power is how often the test then finds the source.
"""

import math
from typing import Literal

import torch

from quantkit.export.verified import Attribution
from quantkit.scoring.expected import Reference

POWER = 0.99
"""The confidence required to name either."""
STRETCH = 16
"""Tokens resampled together, since neighbours share a context."""
LEAST_STRETCHES = 8
"""Fewer are not enough to estimate the variance."""
N_DRAWS = 2000
SEED = 0
FLOOR = 1e-4
"""Nats by which float32 sums differ when their order does."""


def attribute(
    logprobs: list[list[float]], checkpoint: Reference, source: Reference, n_prompts: int
) -> Attribution:
    """Whether an engine's answers are the checkpoint's or the source's, and how certain that is."""
    answers = torch.tensor(logprobs, dtype=torch.float64)
    c, s = checkpoint.exact.double(), source.exact.double()
    noise_c, noise_s = checkpoint.rounded.double() - c, source.rounded.double() - s
    b_c, b_s = (float(noise.abs().mean()) + FLOOR for noise in (noise_c, noise_s))
    # Of the closer one: relative to the other it would be enlarged by the difference.
    seen = min(
        float((answers - reference).abs().mean()) / scale
        for reference, scale in ((c, b_c), (s, b_s))
    )
    noise = max(1.0, seen)
    b_c, b_s = noise * b_c, noise * b_s

    def ratios(answers: torch.Tensor) -> torch.Tensor:
        return (answers - s).abs() / b_s - (answers - c).abs() / b_c + math.log(b_s / b_c)

    right = _stretches(ratios(c + noise * noise_c))
    wrong = _stretches(-ratios(s + noise * noise_s))
    recognised, power = _share_above_zero(right), _share_above_zero(wrong)
    found = ratios(answers)
    nearer: Literal["checkpoint", "source"] | None = None
    if min(recognised, power) >= POWER and bool(found.isfinite().all()):
        nearer = "checkpoint" if float(found.sum()) > 0 else "source"
    return Attribution(
        n_tokens=found.numel(),
        apart=float((c - s).abs().mean()),
        ratio=float(found.mean()),
        noise=noise,
        power=power,
        recognised=recognised,
        nearer=nearer,
        prompts_needed=None if nearer else _needed(min(right, wrong, key=_sigmas), n_prompts),
    )


def _stretches(ratios: torch.Tensor) -> torch.Tensor:
    """Sums over neighbouring tokens."""
    return torch.cat([part.sum(-1) for part in torch.split(ratios, STRETCH, dim=-1)])


def _share_above_zero(sums: torch.Tensor) -> float:
    """How often a sum over as many stretches, drawn with replacement, is above zero."""
    if len(sums) < LEAST_STRETCHES:
        return 0.0
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(len(sums), (N_DRAWS, len(sums)), generator=generator)
    return float((sums[drawn].sum(-1) > 0).double().mean())


def _sigmas(sums: torch.Tensor) -> float:
    """The sum in units of its standard error."""
    total = float(sums.sum())
    spread = float(sums.std()) * len(sums) ** 0.5 if len(sums) > 1 else math.inf
    return total / spread if spread > 0 else total * math.inf if total else 0.0


def _needed(sums: torch.Tensor, n_prompts: int) -> int | None:
    """Prompts with which the weaker side would reach the power; None where none would."""
    sigmas = _sigmas(sums)
    if sigmas <= 0:
        return None
    wanted = 1.5 * 2.33  # the 99th percentile of a normal distribution, and some margin
    least = math.ceil(n_prompts * LEAST_STRETCHES / max(1, len(sums)))
    return max(least, math.ceil(n_prompts * min(1e6, (wanted / sigmas) ** 2)), n_prompts + 1)


def fault(found: Attribution) -> str | None:
    """What is wrong or cannot be decided; None where the checkpoint is served."""
    if found.nearer == "checkpoint":
        return None
    if found.nearer == "source":
        return (
            "its answers are those of the unquantised source, not of the checkpoint "
            f"(log-likelihood ratio {found.ratio:+.2f} nats per token, power {found.power:.2f})"
        )
    hint = f"; --prompts {found.prompts_needed} would do" if found.prompts_needed else ""
    return (
        f"{UNDECIDED} with {found.n_tokens:,} positions: their references differ by "
        f"{found.apart:.4f} nats, and the source would be recognised in {found.power:.0%} of "
        f"cases{hint}"
    )


UNDECIDED = "cannot tell the checkpoint and its unquantised source apart"
