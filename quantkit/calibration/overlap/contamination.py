"""Contamination: rows that share a run of words with evaluation data.

Thirteen words is the length that GPT-3's authors used (Brown et al. 2020, appendix C): shorter runs
are common phrases, longer ones miss copies with a typo.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quantkit.calibration.overlap.shingles import Hashes, portions, shingles, words

N_WORDS = 13
SPARSE = 8  # minimum number of slots per n-gram: most others then hit an empty slot


@dataclass(frozen=True, eq=False)
class EvaluationText:
    """All n-grams of the evaluation texts.

    A shorter text counts as a whole: only a row with exactly the same words shares it.
    """

    n: int
    ngrams: Hashes
    """Sorted and unique."""

    @classmethod
    def of(cls, texts: Iterable[str], n: int = N_WORDS) -> "EvaluationText":
        """From all these texts."""
        parts = [np.unique(shingles(words(portion), n).hashes) for portion in portions(texts)]
        return cls(n, np.unique(np.concatenate([np.empty(0, np.uint64), *parts])))

    @classmethod
    def joined(cls, parts: "Sequence[EvaluationText]") -> "EvaluationText":
        """The union of several."""
        return cls(parts[0].n, np.unique(np.concatenate([part.ngrams for part in parts])))

    @cached_property
    def digest(self) -> str:
        """Equal for the same n-grams, in whatever order the texts came."""
        return hashlib.sha256(
            f"{self.n} ".encode() + self.ngrams.astype("<u8").tobytes()
        ).hexdigest()

    def overlaps(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Whether each text shares at least one n-gram."""
        found = [np.empty(0, np.bool_)]
        found.extend(self._overlaps(portion) for portion in portions(texts))
        return np.concatenate(found)

    def _overlaps(self, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
        parts = shingles(words(texts), self.n)
        shift, taken = self._slots
        maybe = np.flatnonzero(taken.take(parts.hashes >> shift))
        wanted = parts.hashes[maybe]
        at = np.searchsorted(self.ngrams, wanted)
        inside = at < len(self.ngrams)
        hits = maybe[inside][self.ngrams[at[inside]] == wanted[inside]]
        shared = np.zeros(len(texts), np.bool_)
        shared[np.searchsorted(parts.offsets, hits, side="right") - 1] = True
        return shared

    @cached_property
    def _slots(self) -> tuple[np.uint64, npt.NDArray[np.bool_]]:
        """Which leading bits occur at all, and how far to shift for them."""
        bits = (SPARSE * len(self.ngrams) + 1).bit_length()
        shift = np.uint64(64 - bits)
        taken = np.zeros(1 << bits, np.bool_)
        taken[self.ngrams >> shift] = True
        return shift, taken
