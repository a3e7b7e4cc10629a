"""An index of millions of rows by key, in few bytes each, used to look up near-duplicates.

A key of 32 bits and its row number make one integer, and only sorted arrays of these are kept.
Different items may share a key, so callers have to compare the rows they find.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit.calibration.overlap.shingles import Hashes, Places

MOST = 16  # rows returned per key: text from a template would pair every row with all others

Values = npt.NDArray[Any]
Pairs = tuple[Places, Places]
"""Indices of the later rows, and numbers of the earlier ones."""

_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_EMPTY: Hashes = np.empty(0, np.uint64)


class Index:
    """Rows by keys of 32 bits: sorted runs, of which few are long and the short ones get merged."""

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    def add(self, keys: Hashes, rows: Places) -> None:
        """Every run is at least twice as long as the next, so rows are merged only a few times."""
        run = np.sort(packed(keys, rows))
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            # A stable sort detects the two sorted halves and merges them.
            run = np.sort(np.concatenate([self._runs.pop(), run]), kind="stable")
        if len(run):
            self._runs.append(run)

    def find(self, keys: Hashes) -> Pairs:
        """Indices into `keys`, and rows with the same key."""
        order = np.argsort(keys)  # each search then begins in the cache where the last ended
        found = [_matches(run, keys[order]) for run in (_EMPTY, *self._runs)]
        places, rows = (np.concatenate(part) for part in zip(*found, strict=True))
        return order[places], rows

    @property
    def size_bytes(self) -> int:
        """Size of all runs."""
        return sum(run.nbytes for run in self._runs)


class Column:
    """An array that grows in place at its end: a copy would take its memory twice."""

    def __init__(self, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._array = np.empty((0,) if width is None else (0, width), dtype)
        self._n = 0

    def append(self, values: Values) -> None:
        """Copy values to the end."""
        n = self._n + len(values)
        if n > len(self._array):
            self._array.resize((n + n // 8, *self._array.shape[1:]), refcheck=False)
        self._array[self._n : n] = values
        self._n = n

    @property
    def values(self) -> Values:
        """A view that is valid until the next append."""
        return self._array[: self._n]

    @property
    def size_bytes(self) -> int:
        """Including spare capacity."""
        return self._array.nbytes


def packed(high: Values, low: Values) -> Hashes:
    """Two numbers below 2^32 as one, with the first as the high bits."""
    return high.astype(np.uint64) << _HALF | low.astype(np.uint64)


def unpacked(both: Hashes) -> Pairs:
    """The inverse of `packed`."""
    return (both >> _HALF).astype(np.int64), (both & _LOW).astype(np.int64)


def _matches(run: Hashes, keys: Hashes) -> Pairs:
    """Indices into sorted keys, and rows of a run with the same key: the first few of each."""
    first = np.searchsorted(run, keys << _HALF)
    hit = np.flatnonzero(first < len(run))
    hit = hit[run[first[hit]] >> _HALF == keys[hit]]
    first = first[hit]
    last = np.searchsorted(run, keys[hit] << _HALF | _LOW, side="right")
    counts = np.minimum(last - first, MOST)
    ends = np.cumsum(counts)
    within = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    rows = run[np.repeat(first, counts) + within] & _LOW
    return np.repeat(hit, counts), rows.astype(np.int64)
