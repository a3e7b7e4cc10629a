"""Pieces in samples of one length: several in one, or one each with padding behind it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """A piece in a sample, or the beginning of it."""

    piece: int
    n_tokens: int


Sample = tuple[Part, ...]


def pack(
    pieces: Sequence[int],
    spare: Sequence[int],
    lengths: np.ndarray,
    n_samples: int,
    length: int,
) -> list[Sample]:
    """Fill samples; the last piece of each is cut at its end, by as little as can be found.

    A sample begins with the piece whose turn it is and is closed with the one or two others that
    fit best. Spare pieces follow where the others do not suffice. Returns fewer samples than asked
    for when those do not suffice either; the last may then be short.
    """
    left = _Left(pieces, lengths)
    reserve = deque(spare)
    samples: list[Sample] = []
    while len(samples) < n_samples and (left or reserve):
        parts: list[Part] = []
        room = length
        while room and (left or reserve):
            if not left:
                left = _Left([reserve.popleft()], lengths)
            for piece in left.closing(room) if parts else [left.next()]:
                used = min(room, int(lengths[piece]))
                parts.append(Part(piece, used))
                room -= used
        samples.append(tuple(parts))
    return samples


class _Left:
    """Pieces that are not packed yet, by turn and by length."""

    def __init__(self, pieces: Sequence[int], lengths: np.ndarray) -> None:
        self._turns = deque(pieces)
        order = np.argsort(lengths[list(pieces)], kind="stable")
        self._pieces = np.array(pieces, np.int64)[order]
        self._lengths = lengths[self._pieces]

    def __bool__(self) -> bool:
        return len(self._pieces) > 0

    def _take(self, *places: int) -> list[int]:
        taken = self._pieces[list(places)].tolist()
        self._pieces = np.delete(self._pieces, places)
        self._lengths = np.delete(self._lengths, places)
        return taken

    def next(self) -> int:
        """The piece whose turn it is."""
        while True:
            found = np.flatnonzero(self._pieces == self._turns.popleft())
            if len(found):
                return self._take(int(found[0]))[0]

    def closing(self, room: int) -> list[int]:
        """One or two pieces that fill the room and waste least, or any that does not fill it."""
        n = len(self._pieces)
        alone = int(np.searchsorted(self._lengths, room))
        waste = int(self._lengths[alone]) - room if alone < n else None
        if n > 1:
            others = np.searchsorted(self._lengths, room - self._lengths)
            others = np.maximum(others, np.arange(n) + 1)  # the longer one of a pair
            pairs = np.flatnonzero(others < n)
            sums = self._lengths[pairs] + self._lengths[others[pairs]] - room
            if len(sums) and (waste is None or sums.min() < waste):
                first = int(pairs[sums.argmin()])
                return self._take(first, int(others[first]))
        return self._take(alone) if waste is not None else [self.next()]


def pad(pieces: Sequence[int], lengths: np.ndarray) -> list[Sample]:
    """One piece a sample."""
    return [(Part(piece, int(lengths[piece])),) for piece in pieces]


def arrays(
    samples: Sequence[Sample], ids: Sequence[np.ndarray], length: int, padding: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [samples, length] and how many of each sample are real."""
    tokens = np.full((len(samples), length), padding, np.int32)
    lengths = np.zeros(len(samples), np.int32)
    for place, sample in enumerate(samples):
        row = np.concatenate([ids[part.piece][: part.n_tokens] for part in sample])
        tokens[place, : len(row)] = row
        lengths[place] = len(row)
    return tokens, lengths
