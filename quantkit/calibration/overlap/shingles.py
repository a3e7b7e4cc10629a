"""Hashes of the words of many texts, and of runs of words, without a Python loop over words.

A word is a run of letters and digits in lower case; punctuation and symbols only separate words. In
scripts without spaces (Chinese, Japanese, Thai and the like) every character is a word, or a
paragraph would be one; so is every character beyond the basic plane, mainly emoji.

A polynomial over a batch's bytes is accumulated modulo 2^64. The difference of two prefix sums,
divided by the base to the power of its start, depends only on the bytes in between: the hash of a
word at any position. An odd base has an inverse, so the division is a product.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

PIECE = 1 << 15  # bytes at a time, so that sums of eight bytes each stay in a core's cache
PORTION_TEXTS, PORTION_CHARACTERS = 1 << 13, 1 << 23
BASE = 0x9E3779B97F4A7C15
BREAK, LETTER, ALONE = 0, 1, 2  # effect of a character: ends a word, continues it, is one
NO_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u31ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f"
)
TAIL = b"\n\n"  # ends a last word, and can be read past any character
_SPACE = re.compile(rb"[ \n\t\r]")
ASTRAL = "\U00010000-\U0010ffff"
_WORD = re.compile(rf"(?=[^\W_])[{NO_SPACES}]|[{ASTRAL}]|[^\W_{NO_SPACES}{ASTRAL}]+")


@dataclass(frozen=True)
class Words:
    """Hashes in the order of the texts; those of text i are `hashes[offsets[i]:offsets[i + 1]]`."""

    hashes: Hashes
    offsets: Places


def words(texts: Sequence[str]) -> Words:
    """The hash of every word; equal words have equal hashes in any batch."""
    # Text by text: a single accent would make lower-casing a whole batch slow.
    encoded = [text.lower().encode("utf-8", "surrogatepass") for text in texts]
    sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
    raw = b"\n".join(encoded)
    hashes, starts = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for begin, end in _pieces(raw):
        part = np.frombuffer(raw[begin:end] + TAIL, np.uint8)
        first, last = _bounds(part)
        hashes.append(_spans(_byte_values().take(part), first, last))
        starts.append(first + begin)
    begins = np.cumsum(sizes + 1)
    offsets = np.searchsorted(np.concatenate(starts), begins)
    return Words(np.concatenate(hashes), np.concatenate([[0], offsets]).astype(np.int64))


def shingles(words: Words, n: int) -> Words:
    """Hashes of all runs of n words; a shorter text gives one of all its words."""
    lengths = np.diff(words.offsets)
    counts = np.where(lengths == 0, 0, np.maximum(lengths - n + 1, 1))
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    first = np.arange(offsets[-1]) + np.repeat(words.offsets[:-1] - offsets[:-1], counts)
    last = first + np.repeat(np.minimum(lengths, n), counts)
    found = np.empty(len(first), np.uint64)
    for at in range(0, len(first), PIECE):
        begin, end = first[at : at + PIECE], last[at : at + PIECE]
        values = words.hashes[begin[0] : end[-1]]
        found[at : at + PIECE] = _spans(values, begin - begin[0], end - begin[0])
    return Words(found, offsets)


def portions(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in batches of reasonable size and small memory, in their order."""
    portion: list[str] = []
    n_characters = 0
    for text in texts:
        portion.append(text)
        n_characters += len(text)
        if len(portion) == PORTION_TEXTS or n_characters >= PORTION_CHARACTERS:
            yield portion
            portion, n_characters = [], 0
    if portion:
        yield portion


def has_words(text: str, n: int) -> bool:
    """Whether a text has at least n words, without reading the rest."""
    found = _WORD.finditer(text)
    return all(next(found, None) is not None for _ in range(n))


def mixed(hashes: Hashes) -> Hashes:
    """Hashes of hashes, in place: every bit depends on every bit (the finaliser of splitmix64)."""
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def _pieces(raw: bytes) -> Iterator[tuple[int, int]]:
    """Where to split bytes that are too many at once: at a space, which is part of no word."""
    begin = 0
    while begin < len(raw):
        space = _SPACE.search(raw, begin + PIECE)
        end = len(raw) if space is None else space.start() + 1
        yield begin, end
        begin = end


def _bounds(raw: Bytes) -> tuple[Places, Places]:
    """Where words begin and end in bytes that end with `TAIL`."""
    inside = _ascii_kinds().take(raw)
    leads = np.flatnonzero(raw >= 0xC0)
    alone, after = _mark(raw, leads, inside) if len(leads) else (leads, leads)
    edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
    if inside[0]:
        edges = np.concatenate([[0], edges])
    if not len(alone):
        return edges[::2], edges[1::2]
    # A character that is a word begins one where another may end, and vice versa.
    starts, stops = np.zeros((2, len(raw)), np.bool_)
    starts[edges[::2]] = stops[edges[1::2]] = True
    starts[alone] = stops[after] = True
    starts[after] |= inside.take(after)
    stops[alone] |= inside.take(alone - 1) & (alone > 0)
    return np.flatnonzero(starts), np.flatnonzero(stops)


def _mark(raw: Bytes, leads: Places, inside: npt.NDArray[np.bool_]) -> tuple[Places, Places]:
    """Remove separators from `inside`; returns where single-character words begin and end."""
    lead, second, third = (raw.take(leads + k).astype(np.uint16) for k in range(3))
    two = (lead & 0x1F) << 6 | (second & 0x3F)
    three = lead << 12 | (second & 0x3F) << 6 | (third & 0x3F)  # sixteen bits drop the mark
    kinds = _kinds().take(np.where(lead < 0xE0, two, three))
    kinds[lead >= 0xF0] = ALONE
    breaks = np.flatnonzero(kinds == BREAK)
    if len(breaks):
        at, wide = leads[breaks], lead[breaks] >= 0xE0
        inside[at] = inside[at + 1] = False
        inside[at[wide] + 2] = False
    found = np.flatnonzero(kinds == ALONE)
    alone, lead = leads[found], lead[found]
    return alone, alone + 2 + (lead >= 0xE0) + (lead >= 0xF0)


def _spans(values: Hashes, first: Places, last: Places) -> Hashes:
    """The hash of values[first:last] for every pair, equal for equal values at any position."""
    up, down = _powers(1 << max(PIECE, len(values)).bit_length())
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * up[: len(values)], out=sums[1:])
    found = sums.take(last)
    found -= sums.take(first)
    found *= down.take(first)
    return mixed(found)


@cache
def _powers(n: int) -> tuple[Hashes, Hashes]:
    """Powers of the base and of its inverse, for n a power of two."""
    return _geometric(BASE, n), _geometric(pow(BASE, -1, 1 << 64), n)


def _geometric(base: int, n: int) -> Hashes:
    powers = np.ones(n, np.uint64)
    size = 1
    while size < n:
        np.multiply(powers[:size], np.uint64(pow(base, size, 1 << 64)), out=powers[size : 2 * size])
        size *= 2
    return powers


@cache
def _byte_values() -> Hashes:
    """Bytes as unrelated random numbers."""
    return mixed(np.arange(1, 257, dtype=np.uint64) * np.uint64(BASE))


@cache
def _ascii_kinds() -> npt.NDArray[np.bool_]:
    """Whether a byte is inside a word; bytes beyond ASCII are, provisionally."""
    return np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """The effect of every character of the basic plane on a word."""
    return np.array([_kind(chr(point)) for point in range(1 << 16)], np.uint8)


def _kind(character: str) -> int:
    # Marks are accents and vowels on letters; Unicode has them as separate characters.
    if not character.isalnum() and unicodedata.category(character)[0] != "M":
        return BREAK
    return ALONE if re.match(f"[{NO_SPACES}]", character) else LETTER
