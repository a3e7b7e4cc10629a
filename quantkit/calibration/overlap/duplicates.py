"""Near-duplicates among millions of rows, batch by batch; memory grows only with distinct rows.

Similarity is the Jaccard similarity of two texts' sets of word trigrams, which MinHash estimates:
the share of `N_PERMUTATIONS` random orders in which both sets have the same first element (Broder
1997). Rows that agree in a whole band of orders are candidates (locality-sensitive hashing), found
in sorted arrays; a candidate is confirmed by the stored part of its signature, the low eight bits
of every order.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from quantkit.calibration.overlap.buckets import Column, Index, Pairs, packed, unpacked
from quantkit.calibration.overlap.shingles import (
    Hashes,
    Places,
    has_words,
    mixed,
    portions,
    shingles,
    words,
)
from quantkit.calibration.reading.row import Row, content
from quantkit.errors import DataError

N_PERMUTATIONS = 128
SHINGLE_WORDS = 3
PREFIX_WORDS = 8
PAIRS = 1 << 16  # compared at a time
HALF = np.uint64(32)


class DuplicateFinder:
    """Finds near-duplicates of earlier rows, batch by batch, in bounded memory.

    Duplicates are not kept, so a row has to match one that was itself kept. In a bucket of more
    than `MOST` rows only the first are compared; equal texts are always found.
    """

    def __init__(self, threshold: float = 0.8, seed: int = 0) -> None:
        if not 0 < threshold <= 1:
            raise DataError(
                f"a similarity threshold must be above 0 and at most 1, not {threshold}"
            )
        self._seed = seed
        # Of different elements, one in 256 has the same eight bits.
        self._needed = N_PERMUTATIONS * (threshold + (1 - threshold) / 256)
        self._band_rows = band_rows(threshold)
        n_bands = N_PERMUTATIONS // self._band_rows
        self._bands = [Index() for _ in range(n_bands + 1)]
        """The last one indexes whole signatures: equal texts are found whatever the buckets."""
        self._by_prefix = Index()
        self._signatures = Column(np.uint8, N_PERMUTATIONS)
        self._prefixes = Column(np.uint64)
        self._numbers = Column(np.int64)
        self._n_rows = 0

    def add(self, texts: Sequence[str], prefixes: Sequence[str | None]) -> Places:
        """The number of the earlier row that each one duplicates, or -1.

        Rows with an equal prefix are duplicates too, unless it is None.
        """
        assert len(texts) == len(prefixes)
        found, at = [np.empty(0, np.int64)], 0
        for portion in portions(texts):
            found.append(self._add(portion, prefixes[at : at + len(portion)]))
            at += len(portion)
        return np.concatenate(found)

    @property
    def size_bytes(self) -> int:
        """Memory of everything kept."""
        columns = sum(c.size_bytes for c in (self._signatures, self._prefixes, self._numbers))
        return columns + sum(index.size_bytes for index in (*self._bands, self._by_prefix))

    def _add(self, texts: Sequence[str], prefixes: Sequence[str | None]) -> Places:
        whole = signatures(texts, self._seed)
        bands = self._band_keys(whole)
        named = np.array([_hash(prefix) for prefix in prefixes], np.uint64)
        marks = Marks(whole.astype(np.uint8), named)
        originals = np.full(len(texts), -1, np.int64)

        later, rows = self._of_before(bands, marks)
        _set_least(originals, later, self._numbers.values[rows])

        fresh = np.flatnonzero(originals < 0)
        later, earlier = self._of_batch(bands[:, fresh], marks.at(fresh))
        stays = _stay(len(fresh), later, earlier)
        counts = stays[earlier]
        _set_least(originals, fresh[later[counts]], self._n_rows + fresh[earlier[counts]])

        kept = fresh[stays]
        self._keep(bands[:, kept], marks.at(kept), self._n_rows + kept)
        self._n_rows += len(texts)
        return originals

    def _of_before(self, bands: Hashes, marks: "Marks") -> Pairs:
        """Rows of a batch, and indices of similar kept rows."""
        candidates = [index.find(keys) for index, keys in zip(self._bands, bands, strict=True)]
        has = np.flatnonzero(marks.prefixes)
        places, rows = self._by_prefix.find(marks.prefixes[has] >> HALF)
        kept = Marks(self._signatures.values, self._prefixes.values)
        return self._confirmed([*candidates, (has[places], rows)], marks, kept)

    def _of_batch(self, bands: Hashes, marks: "Marks") -> Pairs:
        """Rows of a batch, and similar earlier ones in it."""
        candidates = [_with_equal_keys(keys) for keys in bands]
        has = np.flatnonzero(marks.prefixes)
        later, earlier = _with_equal_keys(marks.prefixes[has] >> HALF)
        return self._confirmed([*candidates, (has[later], has[earlier])], marks, marks)

    def _keep(self, bands: Hashes, marks: "Marks", numbers: Places) -> None:
        rows = len(self._numbers.values) + np.arange(len(numbers))
        for index, keys in zip(self._bands, bands, strict=True):
            index.add(keys, rows)
        has = marks.prefixes > 0
        self._by_prefix.add(marks.prefixes[has] >> HALF, rows[has])
        self._signatures.append(marks.signatures)
        self._prefixes.append(marks.prefixes)
        self._numbers.append(numbers)

    def _band_keys(self, whole: npt.NDArray[np.uint32]) -> Hashes:
        """32-bit keys of every band and of the whole signature of all rows [bands + 1, rows]."""
        products = whole * _multipliers()
        starts = np.arange(0, N_PERMUTATIONS - self._band_rows + 1, self._band_rows)
        stop = starts[-1] + self._band_rows
        by_band = np.add.reduceat(products[:, :stop], starts, axis=1)
        return mixed(np.concatenate([by_band.T, products.sum(1)[None]])) >> HALF

    def _confirmed(self, candidates: list[Pairs], batch: "Marks", known: "Marks") -> Pairs:
        """The pairs that are similar, each once."""
        both = np.unique(np.concatenate([packed(*pairs) for pairs in candidates]))
        later, earlier = unpacked(both)
        alike = np.empty(len(both), np.bool_)
        for at in range(0, len(both), PAIRS):
            one, other = batch.at(later[at : at + PAIRS]), known.at(earlier[at : at + PAIRS])
            n_equal = np.count_nonzero(one.signatures == other.signatures, axis=1)
            same_prefix = (one.prefixes > 0) & (one.prefixes == other.prefixes)
            alike[at : at + PAIRS] = (n_equal >= self._needed) | same_prefix
        return later[alike], earlier[alike]


class Marks(NamedTuple):
    """What rows are compared by."""

    signatures: npt.NDArray[np.uint8]
    """The low eight bits of every permutation [rows, permutations]."""
    prefixes: Hashes
    """0 if there is none."""

    def at(self, rows: Places) -> "Marks":
        """Those of some rows."""
        return Marks(self.signatures[rows], self.prefixes[rows])


def signatures(texts: Sequence[str], seed: int) -> npt.NDArray[np.uint32]:
    """MinHash of every text's shingles [texts, permutations]."""
    parts = shingles(words(texts), SHINGLE_WORDS)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        parts.hashes, parts.offsets.astype(np.uint64), N_PERMUTATIONS, seed
    )
    # Through `array`, which reads lists of integers twice as fast as numpy does.
    rows = b"".join(array("I", row) for row in matrix.to_rows())
    return np.frombuffer(rows, np.uint32).reshape(len(texts), N_PERMUTATIONS)


def band_rows(threshold: float) -> int:
    """Permutations per band: as many as still find pairs a little above the threshold.

    A pair of similarity s agrees in a band of r with probability s^r. False candidates are compared
    and dropped; missed ones are lost.
    """
    similarity = threshold + (1 - threshold) / 4
    rows = 1
    while rows < N_PERMUTATIONS and _found(similarity, rows + 1) >= 0.99:
        rows += 1
    return rows


def prefix_of(row: Row) -> str | None:
    """The beginning of a conversation, which identifies threads of one tree.

    It ends with the turn in which the user has said eight words in all: many chats begin with "hi".
    """
    if row.kind == "text":
        return None
    turns, words = [], ""
    for message in row.messages:
        role, text = str(message.get("role", "")), " ".join(content(message).lower().split())
        # The same question about another image is a different one.
        turns.append(f"{role}: {text}{''.join(message.get('images', ()))}")
        if role == "user":
            words += f" {text}"
            if has_words(words, PREFIX_WORDS):
                return "\n".join(turns)
    return None


def _found(similarity: float, rows: int) -> float:
    """The probability that a pair agrees in at least one band."""
    return float(1 - (1 - similarity**rows) ** (N_PERMUTATIONS // rows))


def _with_equal_keys(keys: Hashes) -> Pairs:
    """Rows of one batch, and earlier ones in it with the same key."""
    index = Index()
    index.add(keys, np.arange(len(keys)))
    later, earlier = index.find(keys)
    return later[earlier < later], earlier[earlier < later]


def _stay(n: int, later: Places, earlier: Places) -> npt.NDArray[np.bool_]:
    """Which rows stay: those that match no earlier row that stays."""
    stays = np.ones(n, np.bool_)
    while True:
        # A row is settled once all before it are, so every round settles at least one more.
        lost = np.zeros(n, np.bool_)
        lost[later[stays[earlier]]] = True
        if np.array_equal(lost, ~stays):
            return stays
        stays = ~lost


def _set_least(originals: Places, later: Places, earlier: Places) -> None:
    """Of several earlier rows, the first."""
    order = np.argsort(-earlier, kind="stable")
    originals[later[order]] = earlier[order]


def _multipliers() -> Hashes:
    return mixed(np.arange(1, N_PERMUTATIONS + 1, dtype=np.uint64)) | np.uint64(1)


def _hash(prefix: str | None) -> int:
    """64 bits, never 0, which stands for none."""
    if prefix is None:
        return 0
    raw = prefix.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little") or 1
