"""What the source makes of its calibration tokens: text of another kind looks like noise to it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.model.blocks import Decoder
from quantkit.onepass.visit import Visit
from quantkit.progress import Progress

NOISE = 5
"""Calibration tokens that are this near to guessing are no text."""
SURPRISE_SAMPLES = 2
SURPRISE_TOKENS = 512


@dataclass
class Probe:
    """Some samples on the source's own path."""

    own: torch.Tensor | None = None
    """Where every stream propagates, states that are carried along."""
    last: Visit | None = None
    is_lost: bool = False
    """Whether the samples could not be followed."""

    def advance(self, visits: Sequence[Visit]) -> None:
        """A block is about to be visited; the first stream is the source's own, if one is."""
        here = self.last = visits[0]
        if not here.stream.propagates or self.is_lost:
            return
        if here.call.carried or here.call.shared:
            self.own, self.is_lost = None, True  # what other blocks leave is not followed here
            return
        if self.own is None:
            self.own = here.first(SURPRISE_SAMPLES)
        arguments = here.call.of_first(len(self.own), here.decoder.device)
        self.own = here.run(here.state, self.own, arguments)

    @property
    def states(self) -> torch.Tensor | None:
        """After the last block; None where they could not be followed."""
        if self.is_lost:
            return None
        if self.own is not None:
            return self.own
        assert self.last is not None
        return self.last.first(SURPRISE_SAMPLES)


def perplexity(
    decoder: Decoder,
    states: torch.Tensor | None,
    calibration: CalibrationTokens,
    progress: Progress,
) -> float | None:
    """Of the samples that the probe followed.

    Only advice, so that nothing which goes wrong here stops a run.
    """
    if states is None:
        return None
    states = states[:, :SURPRISE_TOKENS]
    n_samples, length = states.shape[:2]
    if calibration.lengths is not None:
        length = min(length, int(calibration.lengths[:n_samples].min()))
    if length < 2:
        return None
    try:
        losses = decoder.losses(states[:, :length], calibration.ids[:n_samples, :length])
        mean = float(losses.mean())
    except Exception as error:  # no room for the head, or a family that does it in its own way
        progress.detail(f"the perplexity of the calibration tokens is not known: {error}")
        return None
    found = math.exp(min(mean, 700.0)) if math.isfinite(mean) else None
    guessing = float(decoder.model.config.get_text_config().vocab_size)
    if found is not None and found > guessing / NOISE:
        progress.note(
            f"warning: the model's perplexity on the calibration tokens is {found:,.0f}, "
            f"where guessing has {guessing:,.0f}: they look like noise to it; are they text, and "
            "of its own tokenizer?"
        )
    return found
