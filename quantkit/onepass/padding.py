"""Which positions of a batch are real: samples of different lengths are padded on the right.

Attention needs no mask for that. It is causal, so what stands behind a token never reaches it:
real positions come out as if they were alone, and what padded ones hold matters to nobody, as long
as everything that looks at states looks at the real ones only. A batch without padding is looked at
as it is, with nothing picked and nothing copied.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from quantkit.calibration.tokens import CalibrationTokens

Keep = torch.Tensor | None
"""Places of the real positions in a flattened batch, in order; None where all are real."""


def real(states: torch.Tensor, keep: Keep) -> torch.Tensor:
    """The real positions of [batch, length, ...] or [batch * length, ...], as [positions, ...]."""
    if keep is None:
        return states
    flat = states if states.dim() == 2 else states.flatten(0, 1)
    return flat.index_select(0, keep)


@dataclass(frozen=True)
class Padding:
    """What is real in every batch, worked out once for all blocks."""

    keep: list[Keep]
    """By batch, on the device."""
    beginning: Keep
    """Of the first batch; where ranks share the samples, that of all of them ..."""
    lengths: list[int]
    """... the real tokens of its samples ..."""
    length: int
    """... and what they are padded to."""

    @classmethod
    def of(cls, calibration: CalibrationTokens, batch_size: int, device: torch.device) -> "Padding":
        """Of samples that run in batches of this size, in their order."""
        n_samples, length = calibration.ids.shape
        mask = calibration.mask
        if mask is None:
            lengths = [length] * min(batch_size, n_samples)
            return cls([None] * -(-n_samples // batch_size), None, lengths, length)
        keep = [
            None if part.all() else part.flatten().nonzero().flatten().to(device)
            for part in torch.split(mask, batch_size)
        ]
        return cls(keep, keep[0], mask[:batch_size].sum(1).tolist(), length)

    def of_share(
        self, share: CalibrationTokens, batch_size: int, device: torch.device
    ) -> "Padding":
        """The same beginning, and the batches of one rank's share of the samples."""
        return replace(self, keep=Padding.of(share, batch_size, device).keep)

    def n_samples(self, n_tokens: int) -> int:
        """How many samples of the first batch have so many real tokens at most; one at least."""
        return max(1, bisect_right(list(accumulate(self.lengths)), n_tokens))

    def first(self, n_samples: int) -> Keep:
        """What is real in the first samples of the first batch."""
        lengths = self.lengths[:n_samples]
        if self.beginning is None or min(lengths) == self.length:
            return None
        return self.beginning[: sum(lengths)]
