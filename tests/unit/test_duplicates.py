"""Near-duplicates are found above the threshold and not far below it, however rows are batched."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from quantkit.calibration.overlap import buckets, duplicates
from quantkit.calibration.overlap.duplicates import DuplicateFinder, prefix_of
from quantkit.calibration.reading.row import Row
from quantkit.errors import DataError


def text_of(words) -> str:
    return " ".join(words)


def shingle_set(words) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def pair_of(similarity: float, generator: random.Random) -> tuple[str, str, float]:
    """Two texts with about this Jaccard similarity, and the exact one."""
    words = [f"w{generator.getrandbits(40):x}" for _ in range(generator.randrange(60, 400))]
    other = list(words)
    # Another ending: of n shingles on each side, s in common make s / (2n - s).
    shared = 2 * similarity / (1 + similarity)
    n_new = round((1 - shared) * (len(words) - 2))
    other[len(other) - n_new :] = [f"v{generator.getrandbits(40):x}" for _ in range(n_new)]
    one, two = shingle_set(words), shingle_set(other)
    return text_of(words), text_of(other), len(one & two) / len(one | two)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_recall_and_false_positives_are_as_promised(threshold):
    generator = random.Random(1)
    least = max(0.2, threshold - 0.3)
    pairs = [pair_of(generator.uniform(least, 1.0), generator) for _ in range(1500)]
    finder = DuplicateFinder(threshold)
    # All first ones of pairs are unlike each other, so nothing but the partner can be found.
    assert (finder.add([one for one, _, _ in pairs], [None] * len(pairs)) == -1).all()
    found = finder.add([two for _, two, _ in pairs], [None] * len(pairs))
    exact = np.array([similarity for _, _, similarity in pairs])
    hit = found == np.arange(len(pairs))
    assert (hit | (found == -1)).all()
    above, below = exact >= threshold + 0.05, exact <= threshold - 0.1
    assert min(above.sum(), below.sum()) >= 100
    assert hit[above].mean() >= 0.95
    assert hit[below].mean() <= 0.01


@pytest.mark.parametrize(("similarity", "least", "most"), [(0.86, 0.95, 1.0), (0.69, 0.0, 0.01)])
def test_pairs_just_beyond_the_margins_of_the_default_are_told_apart(similarity, least, most):
    generator = random.Random(2)
    pairs = [pair_of(similarity, generator) for _ in range(1000)]
    finder = DuplicateFinder()
    finder.add([one for one, _, _ in pairs], [None] * len(pairs))
    hits = finder.add([two for _, two, _ in pairs], [None] * len(pairs)) >= 0
    assert least <= hits.mean() <= most


SHORT = ["hi", "Hi!", "thanks", "thank you", "Thank  you.", "ok then", "你好", "", "...", "👍"]


def test_short_texts_are_duplicates_where_they_are_equal():
    found = DuplicateFinder().add(SHORT, [None] * len(SHORT)).tolist()
    assert found == [-1, 0, -1, -1, 3, -1, -1, -1, 7, -1]


def family(generator: random.Random) -> list[str]:
    """Rows of a few themes, some equal, some nearly, most not."""
    themes = [[f"{t}x{n}" for n in range(40)] for t in range(4)]
    rows = []
    for _ in range(40):
        words = list(generator.choice(themes))
        for _ in range(generator.choice([0, 0, 1, 2, 5])):
            words[generator.randrange(40)] = f"r{generator.randrange(50)}"
        rows.append(text_of(words))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_judged_one_after_another_however_they_are_batched(seed, monkeypatch):
    # With bands of two nothing alike is overlooked.
    monkeypatch.setattr(duplicates, "band_rows", lambda threshold: 2)
    monkeypatch.setattr(buckets, "MOST", 1000)
    generator = random.Random(seed)
    texts = family(generator)
    prefixes = [generator.choice([None, None, "a", "b", f"{n}"]) for n in range(len(texts))]
    ends = [0, *sorted(generator.choices(range(40), k=generator.randrange(6))), len(texts)]
    finder = DuplicateFinder()
    found = [finder.add(texts[a:b], prefixes[a:b]).tolist() for a, b in pairwise(ends)]
    assert [number for part in found for number in part] == _obviously(texts, prefixes)


def _obviously(texts, prefixes) -> list[int]:
    """Each row against all that were kept, by the same signatures."""
    low = duplicates.signatures(texts, 0) & 0xFF
    kept, found = [], []
    for j in range(len(texts)):
        alike = [
            i
            for i in kept
            if ((low[i] == low[j]).mean() - 1 / 256) / (1 - 1 / 256) >= 0.8
            or (prefixes[i] is not None and prefixes[i] == prefixes[j])
        ]
        found.append(alike[0] if alike else -1)
        kept += [] if alike else [j]
    return found


def test_duplicates_of_duplicates_refer_to_the_first():
    finder = DuplicateFinder()
    text = text_of(f"word{n}" for n in range(50))
    assert finder.add([text, "something else"], [None, None]).tolist() == [-1, -1]
    assert finder.add([text, text], [None, None]).tolist() == [0, 0]
    assert finder.add([text], [None]).tolist() == [0]


def test_rows_with_an_equal_prefix_are_duplicates_and_those_without_one_are_not():
    texts = [f"entirely different {n} text {n * 7} here" for n in range(5)]
    finder = DuplicateFinder()
    assert finder.add(texts[:3], ["same", None, "same"]).tolist() == [-1, -1, 0]
    assert finder.add(texts[3:], [None, "same"]).tolist() == [-1, 0]


def test_only_distinct_rows_take_memory_and_each_a_few_hundred_bytes():
    generator = random.Random(3)
    texts = [text_of(f"{generator.getrandbits(30)}" for _ in range(20)) for _ in range(9000)]
    finder = DuplicateFinder()
    assert (finder.add(texts, texts) == -1).all()
    size = finder.size_bytes
    assert size <= 400 * len(texts)
    assert finder.add(texts, [None] * len(texts)).tolist() == list(range(len(texts)))
    assert finder.size_bytes == size


def test_a_row_that_a_template_made_is_found_again_among_too_many_of_its_bucket():
    # 600 rows, each 0.7 like every other: buckets overflow, and all are kept.
    shared = [f"shared{n}" for n in range(88)]
    texts = [text_of(shared + [f"own{n}x{k}" for k in range(18)]) for n in range(600)]
    finder = DuplicateFinder()
    first = finder.add(texts, [None] * len(texts))
    assert (first == -1).mean() > 0.9
    again = finder.add(texts, [None] * len(texts))
    kept = np.flatnonzero(first == -1)
    assert (again[kept] <= kept).all()
    assert (again[kept] >= 0).all()


def test_an_index_gives_every_row_of_a_key_and_merges_its_runs():
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 500, 2000).astype(np.uint64)
    index = buckets.Index()
    for at in range(0, 2000, 20):
        index.add(keys[at : at + 20], np.arange(at, at + 20))
    assert len(index._runs) <= 8
    wanted = np.array([7, 3, 499, 501, 7], np.uint64)
    places, rows = index.find(wanted)
    expected = {
        (place, row) for place, key in enumerate(wanted) for row in np.flatnonzero(keys == key)
    }
    assert set(zip(places.tolist(), rows.tolist(), strict=True)) == expected


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.5])
def test_a_threshold_that_is_no_similarity_is_refused(threshold):
    with pytest.raises(DataError, match="similarity"):
        DuplicateFinder(threshold)


def chat(*turns: tuple[str, str]) -> Row:
    return Row("s", "f:1", "chat", [{"role": role, "content": text} for role, text in turns])


ASKED = "Please write a short poem about  the SEA"


def test_threads_with_the_same_beginning_have_the_same_prefix():
    one = chat(("user", ASKED), ("assistant", "Waves."), ("user", "More"))
    two = chat(("user", ASKED.lower().replace("  ", "\n")), ("assistant", "Foam."))
    assert prefix_of(one) == prefix_of(two) == "user: please write a short poem about the sea"
    # A question about another document is another question.
    assert prefix_of(chat(("system", "Be kind."), ("user", ASKED))) != prefix_of(one)


def test_a_prefix_goes_on_until_the_user_has_said_eight_words():
    more = "tell me all about the sea"
    rows = [
        chat(("user", "hi there"), ("assistant", answer), ("user", more), ("assistant", "Blue."))
        for answer in ("Hello!", "Good day!")
    ]
    assert prefix_of(rows[0]) == "user: hi there\nassistant: hello!\nuser: " + more
    assert prefix_of(rows[0]) != prefix_of(rows[1])


def test_words_of_the_assistant_and_of_plain_texts_make_no_prefix():
    assert prefix_of(chat(("user", "hi"), ("assistant", ASKED))) is None
    assert prefix_of(Row("s", "f:1", "text", text=ASKED)) is None
    assert prefix_of(chat(("user", "请写一首关于大海的诗"))) is not None


def test_the_same_question_about_another_image_is_another_chat():
    one, two = (
        replace(row, messages=[{**row.messages[0], "images": [name]}, *row.messages[1:]])
        for row, name in ((chat(("user", ASKED)), "1.png"), (chat(("user", ASKED)), "2.png"))
    )
    assert prefix_of(one) != prefix_of(two)
