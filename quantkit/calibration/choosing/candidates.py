"""The pieces that a set is selected from, as numbers: token counts, cheap features, clusters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from quantkit.calibration.rendering import Piece

WIDTH = 256
"""Width of a feature vector; n-grams are hashed into it with signs, so that collisions cancel."""
MASS = 0.99
ROUNDS = 25
"""Rounds of Lloyd's algorithm; features change little after that."""


@dataclass(frozen=True)
class Counts:
    """Token counts of each piece: rows of a sparse matrix."""

    tokens: np.ndarray
    numbers: np.ndarray
    offsets: np.ndarray

    def of(self, piece: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and counts of one piece."""
        span = slice(self.offsets[piece], self.offsets[piece + 1])
        return self.tokens[span], self.numbers[span]

    def spans(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the entries of some pieces, concatenated; and where each begins."""
        starts, sizes = self.offsets[pieces], np.diff(self.offsets)[pieces]
        first = np.cumsum(sizes) - sizes
        return np.repeat(starts - first, sizes) + np.arange(sizes.sum()), first

    def histogram(self, pieces: np.ndarray, vocabulary: int) -> np.ndarray:
        """Token counts of some pieces together."""
        where, _ = self.spans(pieces)
        return np.bincount(self.tokens[where], self.numbers[where], minlength=vocabulary)


@dataclass(frozen=True)
class Candidates:
    """Pieces of all sources, concatenated."""

    pieces: Sequence[Piece]
    source: np.ndarray
    """Index of each piece's source."""
    shares: np.ndarray
    """Each source's share of the set's tokens."""
    vocabulary: int
    seed: int

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(piece.ids) for piece in self.pieces], dtype=np.int64)

    @cached_property
    def divisible(self) -> np.ndarray:
        """Which pieces may be continued where they were cut."""
        return np.array([piece.divisible for piece in self.pieces], dtype=bool)

    @cached_property
    def counts(self) -> Counts:
        flat = np.concatenate([piece.ids for piece in self.pieces]).astype(np.int64)
        owner = np.repeat(np.arange(len(self.pieces)), self.lengths)
        keys, numbers = np.unique(owner * self.vocabulary + flat, return_counts=True)
        offsets = np.searchsorted(keys, np.arange(len(self.pieces) + 1) * self.vocabulary)
        return Counts(keys % self.vocabulary, numbers.astype(np.float64), offsets)

    @cached_property
    def weights(self) -> np.ndarray:
        """Weight of each piece, such that sources have their shares of tokens: sums to 1."""
        tokens = np.bincount(self.source, self.lengths, minlength=len(self.shares))
        return self.lengths * (self.shares / np.maximum(tokens, 1))[self.source]

    @cached_property
    def histogram(self) -> np.ndarray:
        """The pool's token frequencies: the target for the set."""
        total = np.zeros(self.vocabulary)
        for index, share in enumerate(self.shares):
            mine = self.counts.histogram(np.flatnonzero(self.source == index), self.vocabulary)
            if mine.sum():
                total += share * mine / mine.sum()
        return total

    @cached_property
    def common(self) -> np.ndarray:
        """The most frequent tokens that together make up 99% of the pool."""
        order = np.argsort(-self.histogram, kind="stable")
        mass = np.cumsum(self.histogram[order])
        return order[: int(np.searchsorted(mass, MASS * mass[-1])) + 1]

    @cached_property
    def features(self) -> np.ndarray:
        """One unit vector per piece, from its tokens and token pairs; rare ones count more."""
        flat = np.concatenate([piece.ids for piece in self.pieces]).astype(np.uint64)
        owner = np.repeat(np.arange(len(self.pieces)), self.lengths)
        pair = flat[:-1] * np.uint64(0x9E3779B97F4A7C15) + flat[1:] + np.uint64(1)
        inside = owner[:-1] == owner[1:]
        made = np.zeros((len(self.pieces), WIDTH), np.float32)
        for grams, owners in ((flat, owner), (pair[inside], owner[:-1][inside])):
            made += self._hashed(grams, owners)
        norms = np.linalg.norm(made, axis=1, keepdims=True)
        return made / np.maximum(norms, 1e-12)

    def _hashed(self, grams: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Square roots of counts times log rarity, hashed; each piece normalised to 1."""
        _, gram = np.unique(grams, return_inverse=True)
        width = int(gram.max(initial=0)) + 1
        keys, numbers = np.unique(owners * width + gram, return_counts=True)
        owner, gram = keys // width, keys % width
        rarity = np.log1p(len(self.pieces) / np.bincount(gram, minlength=width))
        mixed = _mix(gram.astype(np.uint64) + np.uint64(self.seed))
        column = (mixed % np.uint64(WIDTH)).astype(np.int64)
        sign = np.where(mixed >> np.uint64(63), 1.0, -1.0)
        values = sign * np.sqrt(numbers) * rarity[gram]
        flat = np.bincount(owner * WIDTH + column, values, minlength=len(self.pieces) * WIDTH)
        made = flat.reshape(-1, WIDTH).astype(np.float32)
        return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)

    def clusters(self, n_clusters: int) -> np.ndarray:
        """The cluster of each piece; neighbouring numbers are neighbouring clusters.

        Spherical k-means by cosine. scikit-learn only has Euclidean distance, and its sums depend
        on version and threads: the selection of samples must not.
        """
        features, rng = self.features, np.random.default_rng(self.seed)
        centres = features[_spread(features, min(n_clusters, len(features)), rng)]
        label = np.zeros(len(features), np.int64)
        for _ in range(ROUNDS):
            before, label = label, (features @ centres.T).argmax(1)
            if (before == label).all():
                break
            sums = np.zeros_like(centres)
            np.add.at(sums, label, features)
            norms = np.linalg.norm(sums, axis=1, keepdims=True)
            centres = np.where(norms > 0, sums / np.maximum(norms, 1e-12), centres)
        rank = np.empty(len(centres), np.int64)
        rank[_chain(centres)] = np.arange(len(centres))
        return rank[label]


def _spread(features: np.ndarray, n: int, rng: np.random.Generator) -> list[int]:
    """Indices of pieces far from each other, drawn as in k-means++."""
    chosen = [int(rng.integers(len(features)))]
    distance = 1 - features @ features[chosen[0]]
    for _ in range(n - 1):
        odds = np.cumsum(np.maximum(distance, 0).astype(np.float64))
        place = int(np.searchsorted(odds, rng.random() * odds[-1])) if odds[-1] > 0 else 0
        chosen.append(min(place, len(features) - 1))
        distance = np.minimum(distance, 1 - features @ features[chosen[-1]])
    return chosen


def _chain(centres: np.ndarray) -> np.ndarray:
    """An order in which each centre is followed by the nearest remaining one."""
    alike = centres @ centres.T
    order, left = [0], np.ones(len(centres), bool)
    left[0] = False
    while left.any():
        order.append(int(np.where(left, alike[order[-1]], -2).argmax()))
        left[order[-1]] = False
    return np.array(order)


def _mix(values: np.ndarray) -> np.ndarray:
    """Scatter numbers over 64 bits (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
