"""Calibration tokens: samples of one length, which may end in padding."""

import hashlib
from dataclasses import dataclass

import torch

from quantkit.calibration.images import Picture
from quantkit.errors import DataError


@dataclass(frozen=True)
class CalibrationTokens:
    """Samples padded to one length, with a digest that identifies them."""

    name: str
    ids: torch.Tensor
    """[samples, length]; values in the padding are ignored."""
    lengths: torch.Tensor | None = None
    """[samples], number of real tokens in each sample; None if all are."""
    pictures: tuple[tuple[Picture, ...], ...] = ()
    """The images of every sample; empty if there are none."""

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        n_samples, length = self.ids.shape
        if self.lengths.shape != (n_samples,):
            raise DataError(
                f"{self.name} has {n_samples} samples but {self.lengths.numel()} lengths of them"
            )
        wrong = ((self.lengths < 1) | (self.lengths > length)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise DataError(
                f"sample {place} of {self.name} has {int(self.lengths[place])} tokens: it must "
                f"have 1 to {length}; leave empty samples out"
            )

    @property
    def mask(self) -> torch.Tensor | None:
        """Which positions are real [samples, length]; None if all are."""
        length = self.ids.shape[1]
        if self.lengths is None or bool((self.lengths == length).all()):
            return None
        return torch.arange(length) < self.lengths[:, None]

    @property
    def n_tokens(self) -> int:
        """Real tokens of all samples."""
        return self.ids.numel() if self.lengths is None else int(self.lengths.sum())

    @property
    def digest(self) -> str:
        ids, what, mask = self.ids, f"{tuple(self.ids.shape)}", self.mask
        if mask is not None:
            assert self.lengths is not None
            ids, what = ids * mask, f"{what} {self.lengths.tolist()}"
        if self.pictures:
            what = f"{what} {[[one.name for one in some] for some in self.pictures]}"
        raw = ids.to(torch.int32).contiguous().numpy().tobytes()
        return hashlib.sha256(what.encode() + raw).hexdigest()

    def longest_first(self) -> "CalibrationTokens":
        """The same samples by decreasing length, so that padding gathers in the last batches."""
        if self.lengths is None:
            return self
        order = self.lengths.argsort(descending=True, stable=True)
        pictures = tuple(self.pictures[n] for n in order.tolist()) if self.pictures else ()
        return CalibrationTokens(self.name, self.ids[order], self.lengths[order], pictures)

    def share(self, rank: int, size: int) -> "CalibrationTokens":
        """Every `size`-th sample; empty if there are more ranks than samples."""
        lengths = None if self.lengths is None else self.lengths[rank::size]
        pictures = self.pictures[rank::size]
        return CalibrationTokens(self.name, self.ids[rank::size], lengths, pictures)
