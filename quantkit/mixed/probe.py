"""What a change of one unit alone does to the model's predictions.

A few samples go through the blocks once more for every unit, with that unit rounded and everything
else as the source has it. All of them travel together, block by block, beside the pass: those whose
unit lies behind go on, those whose unit is here begin from the source's own states.
"""

from collections.abc import Mapping

import torch

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.model.blocks import Decoder
from quantkit.onepass.padding import Keep, real
from quantkit.onepass.visit import Visit

TOKENS = {"cuda": 4096, "cpu": 1024}


class Probe:
    """States of a few samples, by the unit that was changed on their way."""

    def __init__(self) -> None:
        self._clean: torch.Tensor | None = None
        self._states: dict[str, torch.Tensor] = {}
        self._keep: Keep = None
        self.is_lost = False
        """Whether this family's blocks hand on more than states, which is not followed."""

    def advance(self, visit: Visit, changed: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Through a block; `changed` has other parameters of it by unit."""
        if visit.index == 0:
            n_samples = visit.padding.n_samples(TOKENS[visit.decoder.device.type])
            self._clean, self._states = visit.first(n_samples), {}
            self._keep = visit.padding.first(n_samples)
        if visit.call.carried or visit.call.shared:
            self.is_lost = True
        if self.is_lost:
            return
        assert self._clean is not None
        decoder, before = visit.decoder, self._clean
        arguments = visit.call.of_first(len(before), decoder.device)
        with decoder.loaded(visit.index, visit.state) as block:
            for unit, states in self._states.items():
                self._states[unit] = decoder.run(block, states, arguments)
            self._clean = decoder.run(block, before, arguments)
        for unit, parameters in changed.items():
            self._states[unit] = visit.run({**visit.state, **parameters}, before, arguments)

    @property
    def n_tokens(self) -> int:
        """Real ones."""
        if self._clean is None or self.is_lost:
            return 0
        return (
            self._clean.shape[0] * self._clean.shape[1] if self._keep is None else len(self._keep)
        )

    def divergences(self, decoder: Decoder, calibration: CalibrationTokens) -> dict[str, float]:
        """Mean KL in nats per token, by unit; empty where the samples were lost."""
        if self.is_lost or self._clean is None:
            return {}
        ids = calibration.ids[: len(self._clean)]
        lengths = calibration.lengths
        totals = dict.fromkeys(self._states, 0.0)
        with decoder.head() as logits:
            for sample in range(len(ids)):
                one = slice(sample, sample + 1)
                n_real = ids.shape[1] if lengths is None else int(lengths[sample])
                wanted = logits(self._clean[one], ids[one])[:n_real].log_softmax(-1)
                p = wanted.exp()
                for unit, states in self._states.items():
                    found = logits(states[one], ids[one])[:n_real].log_softmax(-1)
                    totals[unit] += float((p * (wanted - found)).sum(dtype=torch.float64))
        return {unit: max(0.0, total / self.n_tokens) for unit, total in totals.items()}

    def clean_states(self) -> torch.Tensor | None:
        """The source's own, at real positions."""
        return None if self._clean is None else real(self._clean, self._keep)
