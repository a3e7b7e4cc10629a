"""Perplexity of the source and of recipes on some calibration tokens.

To the source, text of another kind looks like noise. To a recipe's result, its own calibration
tokens must not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.model.blocks import Decoder
from quantkit.onepass.visit import Visit
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress

NOISE = 5
"""Calibration tokens with a perplexity this close to guessing are not text."""
WORSE = 1.5
"""A recipe's perplexity from this multiple of the source's on is reported."""
SURPRISE_SAMPLES = 2
SURPRISE_TOKENS = 512


@dataclass
class Probe:
    """Some samples on the source's own path."""

    own: torch.Tensor | None = None
    """Where every stream propagates, states that are computed separately."""
    last: Visit | None = None
    is_lost: bool = False
    """Whether the samples could not be followed."""

    def advance(self, visits: Sequence[Visit]) -> None:
        """A block is about to be visited; the first stream is the source's own, if there is one."""
        here = self.last = visits[0]
        if not here.stream.propagates or self.is_lost:
            return
        if here.call.carried or here.call.shared:
            self.own, self.is_lost = None, True  # what other blocks pass on is not supported here
            return
        if self.own is None:
            self.own = here.first(SURPRISE_SAMPLES)
        arguments = here.call.of_first(len(self.own), here.decoder.device)
        self.own = here.run(here.state, self.own, arguments)

    @property
    def states(self) -> torch.Tensor | None:
        """States after the last block; None where they could not be followed."""
        if self.is_lost:
            return None
        if self.own is not None:
            return self.own
        assert self.last is not None
        return self.last.first(SURPRISE_SAMPLES)

    def quantised_states(
        self, visits: Sequence[Visit], plans: Sequence[Plan]
    ) -> dict[str, torch.Tensor]:
        """The same samples after the last block of every recipe with its own stream."""
        return {
            plans[index].recipe.name: visit.first(SURPRISE_SAMPLES)
            for visit in visits
            if visit.stream.propagates and not self.is_lost
            for index in visit.stream.indices
        }


def perplexity(
    decoder: Decoder,
    states: torch.Tensor | None,
    made: Mapping[str, torch.Tensor],
    calibration: CalibrationTokens,
    progress: Progress,
) -> float | None:
    """Perplexity of the samples that the probe followed; warns where it looks wrong.

    `made` has the same samples by recipe: those that make them much worse are reported.
    """
    if states is None:
        return None
    source, *others = _perplexities(decoder, [states, *made.values()], calibration, progress)
    guessing = float(decoder.model.config.get_text_config().vocab_size)
    if source is not None and source > guessing / NOISE:
        progress.note(
            f"warning: the model's perplexity on the calibration tokens is {source:,.0f}, "
            f"where guessing has {guessing:,.0f}: they look like noise; are they text, tokenised "
            "by this model's tokenizer?"
        )
    for name, found in zip(made, others, strict=True):
        if source is not None and found is not None and found > WORSE * source:
            progress.note(
                f"warning: recipe {name} raises the perplexity of its own calibration tokens from "
                f"{source:,.1f} to {found:,.1f}; score it before you serve it"
            )
    return source


def _perplexities(
    decoder: Decoder,
    samples: Sequence[torch.Tensor],
    calibration: CalibrationTokens,
    progress: Progress,
) -> list[float | None]:
    """Of the same tokens by several states; the head is loaded once for all.

    Only advice, so nothing that goes wrong here stops a run.
    """
    n_samples, length = samples[0][:, :SURPRISE_TOKENS].shape[:2]
    if calibration.lengths is not None:
        length = min(length, int(calibration.lengths[:n_samples].min()))
    unknown: list[float | None] = [None] * len(samples)
    if length < 2:
        return unknown
    states = torch.cat([sample[:, :length] for sample in samples])
    ids = calibration.ids[:n_samples, :length].repeat(len(samples), 1)
    try:
        means = decoder.losses(states, ids).view(len(samples), -1).mean(1).tolist()
    except Exception as error:  # not enough memory for the head, or a family with its own way
        progress.detail(f"the perplexity of the calibration tokens is not known: {error}")
        return unknown
    return [math.exp(min(mean, 700.0)) if math.isfinite(mean) else None for mean in means]
