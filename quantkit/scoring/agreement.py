"""Does an engine compute what the checkpoint says? Differences, and how large they may be.

The limit is measured per format, not taken from a table. Our reference is computed twice: in
float32, and in the engine's compute dtype, with inputs of layers and the cache rounded as the
format rounds them. The gap between the two is the effect of that arithmetic on the last bits of
every sum:

- weight-only formats: the rounding of sums and inputs to bfloat16 or float16, a hundredth of a nat;
- rounded activations (FP8, W8A8): a last bit that falls the other way moves an input by a whole
  step of 8 bits, and the gap measured with that rounding in place has grown accordingly;
- an FP8 cache: the same for keys and values.

An engine is another such rounding of the same sums, in another order, so it is about as far from
float32 as our own rounding is. Twice that is more than order can explain. A wrong scale, zero
point or layout shows as a multiple of it.
"""

from typing import Any

import torch

from quantkit.export.verified import Agreement
from quantkit.scoring.expected import Reference
from quantkit.scoring.prompts import Prompts

MEAN_TIMES = 2.0
P99_TIMES = 3.0
"""Rare tokens are noisier, since there are few of them."""
SLACK = 0.002
"""A difference in nats that is indistinguishable from zero, for cases without measurable noise."""
MANY = 1000
"""Tokens from which on the tail of the differences is judged too."""

FEW = 16
"""Texts up to which each one's own difference is kept."""


def compare(logprobs: list[list[float]], reference: Reference) -> Agreement:
    """Compare an engine's log-probabilities with the reference's."""
    apart = (torch.tensor(logprobs, dtype=torch.float64) - reference.exact).abs()
    rounding = (reference.rounded.double() - reference.exact).abs()
    off, noise = apart.flatten(), rounding.flatten()
    return Agreement(
        n_tokens=off.numel(),
        mean=float(off.mean()),
        p99=float(off.quantile(0.99)),
        largest=float(off.max()),
        noise_mean=float(noise.mean()),
        noise_p99=float(noise.quantile(0.99)),
        limit_mean=MEAN_TIMES * float(noise.mean()) + SLACK,
        limit_p99=P99_TIMES * float(noise.quantile(0.99)) + 5 * SLACK,
        by_text=_rounded(apart.mean(1)) if len(apart) <= FEW else [],
        by_place=_rounded(apart.mean(0)) if len(apart) <= FEW else [],
    )


def faults(what: str, found: Agreement) -> list[str]:
    """What is wrong with it, in words; empty where rounding explains it."""
    if not found.mean <= found.limit_mean:  # NaN, too
        return [
            f"log-probabilities of {what} differ from the reference by {found.mean:.4f} on "
            f"average, and rounding explains {found.limit_mean:.4f}"
        ]
    if found.n_tokens >= MANY and not found.p99 <= found.limit_p99:
        return [
            f"log-probabilities of {what} differ from the reference by {found.p99:.3f} and more in "
            f"one token of 100, and rounding explains {found.limit_p99:.3f}"
        ]
    return []


def shape_faults(
    texts: list[str], tokens: list[list[int]], logprobs: list[list[float]], asked: Prompts
) -> list[str]:
    """What can be checked of generated text without any reference."""
    found, n_prompts, n_tokens = [], len(asked.generate), asked.max_tokens
    if not len(texts) == len(tokens) == len(logprobs) == n_prompts:
        found.append(f"it was asked to continue {n_prompts} prompts and gave {len(tokens)} texts")
    lengths = [*map(len, tokens), *map(len, logprobs)]
    if any(length != n_tokens for length in lengths):
        odd = next(length for length in lengths if length != n_tokens)
        found.append(f"it was asked for {n_tokens} tokens per prompt and gave {odd}")
    if not _finite(logprobs):
        found.append("it gives log-probabilities that are not finite")
    if texts and not any(text.strip() for text in texts):
        found.append("it generates only whitespace")
    return found


def prompt_faults(logprobs: list[list[float]], asked: Prompts) -> list[str]:
    """Whether every prompt has log-probabilities for all tokens but the first."""
    wanted, received = [len(ids) - 1 for ids in asked.score], [len(row) for row in logprobs]
    if received == wanted:
        return []
    return [
        f"it was asked about {sum(wanted):,} tokens of {len(wanted)} prompts and returned "
        f"{sum(received):,} tokens of {len(received)}"
    ]


def _rounded(means: torch.Tensor) -> list[float]:
    return [round(mean, 5) for mean in means.tolist()]


def _finite(values: Any) -> bool:
    return bool(torch.tensor([v for row in values for v in row]).isfinite().all())
