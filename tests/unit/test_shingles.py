"""Words of a batch are those that a slow and obvious loop finds, and hashes tell them apart."""

import unicodedata
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantkit.calibration.overlap import shingles
from quantkit.calibration.overlap.shingles import Words, words

WITHOUT_SPACES = [
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x31FF),
    (0x3400, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
]
PIECES = [
    *["a", "B", "7", " ", "\n", "_", "don't", "don\u2019t", "\u2014", "\u00a0", "«", "\x00"],
    *[
        "é",
        "É",
        "İ",
        "ß",
        "Σ",
        "\u0301",
        "한국",
        "हिन्दी",
        "你",
        "好",
        "。",
        "\uff0c",
        "か",
        "ไ",
        "ท",
    ],
    *["👍", "\U0001d400", "\ud800"],
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=12)


def slow_words(text: str) -> list[str]:
    found, word = [], ""
    for character in text.lower() + " ":
        point = ord(character)
        letter = character.isalnum() or unicodedata.category(character).startswith("M")
        alone = point > 0xFFFF or (letter and any(a <= point <= b for a, b in WITHOUT_SPACES))
        if alone or not letter:
            found += [word] if word else []
            found += [character] if alone else []
            word = ""
        else:
            word += character
    return found


def rows_of(hashed: Words) -> list[list[int]]:
    ends = hashed.offsets.tolist()
    return [hashed.hashes[a:b].tolist() for a, b in pairwise(ends)]


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT, max_size=6))
def test_words_are_those_of_the_slow_way_and_equal_words_have_equal_hashes(texts):
    expected = [slow_words(text) for text in texts]
    hashed = words(texts)
    assert hashed.hashes.dtype == np.uint64
    assert hashed.offsets.dtype == np.int64
    found = rows_of(hashed)
    assert [len(row) for row in found] == [len(row) for row in expected]
    by_word: dict[str, set[int]] = {}
    for row, hashes in zip(expected, found, strict=True):
        for word, value in zip(row, hashes, strict=True):
            by_word.setdefault(word, set()).add(value)
    assert all(len(values) == 1 for values in by_word.values())
    assert len({value for values in by_word.values() for value in values}) == len(by_word)


@settings(max_examples=100, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=8), st.data())
def test_a_split_of_a_batch_changes_no_hash(texts, data):
    cut = data.draw(st.integers(0, len(texts)))
    assert rows_of(words(texts)) == rows_of(words(texts[:cut])) + rows_of(words(texts[cut:]))


def test_where_the_bytes_are_cut_changes_no_hash(monkeypatch):
    texts = ["".join(PIECES) + " plain words\tgo on " * 9, "", "你好" * 50, "no-space" * 30]
    whole = words(texts)
    for size in (1, 7, 64):
        monkeypatch.setattr(shingles, "PIECE", size)
        cut = words(texts)
        assert np.array_equal(cut.hashes, whole.hashes)
        assert np.array_equal(cut.offsets, whole.offsets)


def test_every_character_is_classed_as_the_slow_way_does():
    texts = [f"a{chr(point)}b" for point in range(0x3200)]
    found = [len(row) for row in rows_of(words(texts))]
    assert found == [len(slow_words(text)) for text in texts]


def test_a_hundred_thousand_words_have_as_many_hashes_and_every_bit_is_used():
    hashes = words([" ".join(f"{n:x}" for n in range(100_000))]).hashes
    assert len(np.unique(hashes)) == 100_000
    shares = [float(((hashes >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
    assert all(abs(share - 0.5) < 0.01 for share in shares)  # six standard errors


@pytest.mark.parametrize("texts", [[], [""], ["", "...", ""]])
def test_nothing_said_is_no_words(texts):
    hashed = words(texts)
    assert not len(hashed.hashes)
    assert hashed.offsets.tolist() == [0] * (len(texts) + 1)
    assert shingles.shingles(hashed, 3).offsets.tolist() == [0] * (len(texts) + 1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=7).map(" ".join), max_size=6),
    st.integers(1, 5),
)
def test_shingles_are_all_runs_inside_a_text_or_the_whole_of_a_short_one(texts, n):
    expected = []
    for text in texts:
        said = tuple(text.split())
        runs = [said[i : i + n] for i in range(len(said) - n + 1)]
        expected.append(runs or ([said] if said else []))
    found = rows_of(shingles.shingles(words(texts), n))
    assert [len(row) for row in found] == [len(row) for row in expected]
    pairs = {
        (run, value)
        for row, hashes in zip(expected, found, strict=True)
        for run, value in zip(row, hashes, strict=True)
    }
    assert len(pairs) == len({run for run, _ in pairs}) == len({value for _, value in pairs})


@example("\N{HEXAGRAM FOR THE CREATIVE HEAVEN}")
@given(TEXT.filter(lambda text: not any(unicodedata.category(c)[0] == "M" for c in text)))
def test_a_text_has_as_many_words_as_are_hashed(text):
    n = len(words([text]).hashes)
    assert shingles.has_words(text, n)
    assert not shingles.has_words(text, n + 1)
