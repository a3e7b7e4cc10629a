"""Rows that share thirteen words in a row with evaluation text are found, and no others."""

import random

import pytest

from quantkit.calibration.overlap import contamination, shingles
from quantkit.calibration.overlap.contamination import EvaluationText

SENTENCE = "The quick brown fox jumps over the lazy dog while nobody in town is watching it"
WORDS = SENTENCE.split()
SHORT = "What is the capital of France?"


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not():
    evaluation = EvaluationText.of([SENTENCE])
    rows = [
        "Before. " + " ".join(WORDS[2:15]) + " And after.",
        "before " + " ".join(WORDS[2:14]) + " and after",
        " ".join(WORDS[:8]) + " something " + " ".join(WORDS[8:]),
        "",
    ]
    assert evaluation.overlaps(rows).tolist() == [True, False, False, False]


def test_case_and_punctuation_hide_nothing():
    evaluation = EvaluationText.of([SENTENCE])
    row = "\u201c" + ", ".join(WORDS[:13]).upper() + "\u201d"
    assert evaluation.overlaps([row]).tolist() == [True]


def test_a_short_evaluation_text_is_matched_as_a_whole_alone():
    evaluation = EvaluationText.of([SHORT])
    rows = [
        "what is the capital of france",
        f"Somebody asked me yesterday in the street: {SHORT} I said that I did not know",
        "the capital of France",
        f"{SHORT} Paris",
    ]
    assert evaluation.overlaps(rows).tolist() == [True, False, False, False]


def test_a_short_row_is_no_part_of_a_long_evaluation_text():
    evaluation = EvaluationText.of([SENTENCE])
    assert evaluation.overlaps([" ".join(WORDS[:12]), " ".join(WORDS[:3])]).tolist() == [False] * 2


def test_no_evaluation_text_overlaps_with_nothing():
    evaluation = EvaluationText.of([])
    assert evaluation.overlaps([SENTENCE, ""]).tolist() == [False, False]
    assert evaluation.overlaps([]).tolist() == []
    assert EvaluationText.of(["", "..."]).overlaps([SENTENCE, ""]).tolist() == [False, False]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_overlaps_are_those_of_sets_of_tuples(n, monkeypatch):
    monkeypatch.setattr(shingles, "PORTION_TEXTS", 7)  # several portions
    monkeypatch.setattr(contamination, "SPARSE", 1)  # crowded slots
    generator = random.Random(n)

    def text() -> str:
        words = [generator.choice("abcdefghijkl") for _ in range(generator.randrange(6))]
        return " ".join(words)

    def grams(text: str) -> set[tuple[str, ...]]:
        words = tuple(text.split())
        runs = {words[i : i + n] for i in range(len(words) - n + 1)}
        return runs or ({words} if words else set())

    scored, rows = [text() for _ in range(20)], [text() for _ in range(60)]
    known = set().union(*map(grams, scored))
    expected = [bool(grams(row) & known) for row in rows]
    assert EvaluationText.of(scored, n).overlaps(rows).tolist() == expected
    assert True in expected


def test_the_digest_tells_texts_apart_and_not_their_order():
    one = EvaluationText.of([SENTENCE, SHORT])
    assert one.digest == EvaluationText.of(iter([SHORT, SENTENCE, SHORT])).digest
    assert one.digest != EvaluationText.of([SENTENCE]).digest
    assert one.digest != EvaluationText.of([SENTENCE, SHORT], 12).digest
