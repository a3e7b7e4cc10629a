"""Which positions of a batch are real: samples of different lengths are padded on the right.

Attention needs no mask for that. It is causal, so what comes after a token never affects it: real
positions come out as if there were no padding, and the values at padded ones do not matter, as long
as everything that reads states reads only the real ones. A batch without padding is used directly,
with nothing selected and nothing copied.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from quantkit.calibration.tokens import CalibrationTokens

Keep = torch.Tensor | None
"""Indices of the real positions in a flattened batch, in order; None where all are real."""


def real(states: torch.Tensor, keep: Keep) -> torch.Tensor:
    """The real positions of [batch, length, ...] or [batch * length, ...], as [positions, ...]."""
    if keep is None:
        return states
    flat = states if states.dim() == 2 else states.flatten(0, 1)
    return flat.index_select(0, keep)


def sample_lengths(states: torch.Tensor, keep: Keep) -> torch.Tensor:
    """The real positions of every sample of [batch, length, ...], on the device."""
    n_samples, length = states.shape[:2]
    if keep is None:
        return torch.full((n_samples,), length, device=states.device)
    counts = torch.zeros(n_samples, dtype=torch.long, device=keep.device)
    return counts.index_add_(0, keep // length, torch.ones_like(keep))


@dataclass(frozen=True)
class Padding:
    """Which positions are real in every batch, computed once for all blocks."""

    keep: list[Keep]
    """By batch, on the device ..."""
    learnt: list[Keep]
    """... and by the smaller batches that gradients are taken of."""
    beginning: Keep
    """Of the first batch; where ranks share the samples, of that of all ranks ..."""
    lengths: list[int]
    """... the real tokens of its samples ..."""
    length: int
    """... and the length they are padded to."""

    @classmethod
    def of(cls, calibration: CalibrationTokens, batch_size: int, device: torch.device) -> "Padding":
        """Padding of samples that run in batches of this size, in order."""
        n_samples, length = calibration.ids.shape
        mask = calibration.mask
        if mask is None:
            lengths = [length] * min(batch_size, n_samples)
            keep: list[Keep] = [None] * -(-n_samples // batch_size)
            return cls(keep, keep, None, lengths, length)
        keep = [
            None if part.all() else part.flatten().nonzero().flatten().to(device)
            for part in torch.split(mask, batch_size)
        ]
        return cls(keep, keep, keep[0], mask[:batch_size].sum(1).tolist(), length)

    def of_share(
        self, share: CalibrationTokens, batch_size: int, device: torch.device, merged: int = 1
    ) -> "Padding":
        """The same beginning, and the batches of one rank's share of the samples."""
        keep, learnt = (Padding.of(share, n * batch_size, device).keep for n in (merged, 1))
        return replace(self, keep=keep, learnt=learnt)

    def n_samples(self, n_tokens: int) -> int:
        """How many samples of the first batch have at most this many real tokens; at least one."""
        return max(1, bisect_right(list(accumulate(self.lengths)), n_tokens))

    def first(self, n_samples: int) -> Keep:
        """The real positions in the first samples of the first batch."""
        lengths = self.lengths[:n_samples]
        if self.beginning is None or min(lengths) == self.length:
            return None
        return self.beginning[: sum(lengths)]
