"""Packs pieces into samples of one length: several in one, or one each with padding."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """A piece in a sample, or part of one."""

    piece: int
    n_tokens: int
    start: int = 0

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Its tokens, given those of its piece."""
        return ids[self.start : self.start + self.n_tokens]


Sample = tuple[Part, ...]


def pack(
    pieces: Sequence[int],
    spare: Sequence[int],
    lengths: np.ndarray,
    n_samples: int,
    length: int,
    divisible: np.ndarray | None = None,
) -> list[Sample]:
    """Fill samples; the last piece of each is cut at its end, by as little as possible.

    A sample begins with the next piece in turn and is closed with the one or two others that fit
    best. Spare pieces follow if the others do not suffice, and then the ends that were cut off, of
    pieces that may begin anywhere. Returns fewer samples than requested if those do not suffice
    either; the last may then be short.
    """
    left = _Remaining(pieces, lengths)
    reserve = deque(spare)
    ends: deque[Part] = deque()
    samples: list[Sample] = []
    while len(samples) < n_samples and (left or reserve or ends):
        parts: list[Part] = []
        room = length
        while room and (left or reserve or ends):
            if not left and reserve:
                left = _Remaining([reserve.popleft()], lengths)
            if left:
                # Pieces in turn, until one or two can close the sample.
                near = parts and room <= 2 * left.longest
                places = left.closing(room) if near else [left.next()]
                found = [Part(piece, int(lengths[piece])) for piece in places]
            else:
                found = [ends.popleft()]
            for part in found:
                used = Part(part.piece, min(room, part.n_tokens), part.start)
                parts.append(used)
                room -= used.n_tokens
                rest = part.n_tokens - used.n_tokens
                if rest and divisible is not None and divisible[part.piece]:
                    ends.append(Part(part.piece, rest, part.start + used.n_tokens))
        samples.append(tuple(parts))
    return samples


class _Remaining:
    """Pieces that are not packed yet, by turn and by length."""

    def __init__(self, pieces: Sequence[int], lengths: np.ndarray) -> None:
        order = np.argsort(lengths[list(pieces)], kind="stable")
        self._pieces = np.array(pieces, np.int64)[order]
        self._lengths = lengths[self._pieces]
        self._there = np.ones(len(self._pieces), bool)
        self._turns = deque(np.argsort(order, kind="stable").tolist())
        self._n = len(self._pieces)

    def __bool__(self) -> bool:
        return self._n > 0

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return int(self._lengths[-1])

    def _take(self, *places: int) -> list[int]:
        self._there[list(places)] = False
        self._n -= len(places)
        taken: list[int] = self._pieces[list(places)].tolist()
        return taken

    def next(self) -> int:
        """The next piece in turn."""
        while True:
            place = self._turns.popleft()
            if self._there[place]:
                return self._take(place)[0]

    def closing(self, room: int) -> list[int]:
        """One or two pieces that fill the room and waste least, or any that does not fill it."""
        there = np.flatnonzero(self._there)
        lengths = self._lengths[there]
        n = len(there)
        alone = int(np.searchsorted(lengths, room))
        waste = int(lengths[alone]) - room if alone < n else None
        if n > 1:
            others = np.searchsorted(lengths, room - lengths)
            others = np.maximum(others, np.arange(n) + 1)  # the longer one of a pair
            pairs = np.flatnonzero(others < n)
            sums = lengths[pairs] + lengths[others[pairs]] - room
            if len(sums) and (waste is None or sums.min() < waste):
                first = int(pairs[sums.argmin()])
                return self._take(int(there[first]), int(there[others[first]]))
        return self._take(int(there[alone])) if waste is not None else [self.next()]


def pad(pieces: Sequence[int], lengths: np.ndarray) -> list[Sample]:
    """One piece per sample."""
    return [(Part(piece, int(lengths[piece])),) for piece in pieces]


def arrays(
    samples: Sequence[Sample], ids: Sequence[np.ndarray], length: int, padding: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [samples, length] and the number of real ones in each sample."""
    tokens = np.full((len(samples), length), padding, np.int32)
    lengths = np.zeros(len(samples), np.int32)
    for place, sample in enumerate(samples):
        row = np.concatenate([part.of(ids[part.piece]) for part in sample])
        tokens[place, : len(row)] = row
        lengths[place] = len(row)
    return tokens, lengths
