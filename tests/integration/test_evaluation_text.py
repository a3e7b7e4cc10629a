"""What tasks score on is what contamination checks get to see."""

import json
from types import SimpleNamespace

import pytest

from quantkit.calibration.overlap.contamination import EvaluationText
from quantkit.calibration.reading import python_text
from quantkit.scoring import evaluation_text
from quantkit.scoring.evaluation_text import texts
from quantkit.scoring.tasks.python_quiz.questions import N_QUESTIONS


@pytest.fixture(scope="module")
def own():
    """Of our tasks, which need no data: pages and then questions."""
    return list(texts(["python_docs", "python_quiz"]))


@pytest.fixture(scope="module")
def pages():
    return [document.text for document in python_text.heldout()]


def test_a_task_of_perplexity_gives_its_pages(own, pages):
    assert own[: len(pages)] == pages


def test_a_task_of_questions_gives_each_with_all_its_choices(own, pages):
    asked, whole = own[len(pages) :], "\n".join(pages)
    assert len(asked) == 4 * N_QUESTIONS
    for at in range(0, len(asked), 4 * 20):
        assert sum(text in whole for text in asked[at : at + 4]) == 1  # with the right choice


def runs_of(text: str) -> set[tuple[str, ...]]:
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return set(zip(*(words[k:] for k in range(13)), strict=False))


def test_pages_overlap_and_training_text_does_where_it_says_the_same(own, pages):
    evaluation = EvaluationText.of(own)
    assert evaluation.overlaps(pages).all()
    training = [document.text for document in python_text.topics("train")]
    known = set().union(*map(runs_of, own))
    expected = [not known.isdisjoint(runs_of(text)) for text in training]
    assert evaluation.overlaps(training).tolist() == expected
    assert not all(expected)


def test_data_of_a_folder_is_read_as_scoring_reads_it(tmp_path):
    folder = tmp_path / "openai" / "gsm8k"
    (folder / "main").mkdir(parents=True)
    lines = ["---", "configs:", "- config_name: main", "  data_files:"]
    for split in ("train", "test"):
        lines += [f"  - split: {split}", f"    path: main/{split}.jsonl"]
        row = {"question": f"How many of {split}?", "answer": f"All. #### {len(split)}"}
        (folder / "main" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    found = list(texts(["gsm8k"], tmp_path))
    assert found == ["Question: How many of test?\nAnswer: All. #### 4"]


@pytest.mark.parametrize(
    ("text", "choices", "target", "expected"),
    [
        (1, ["As Ann", "As Bob"], "won.", ["As Ann won.", "As Bob won."]),
        ("Who?", None, ["Ann", "Bob"], ["Who? Ann", "Who? Bob"]),
        ("Who?", None, "Ann", ["Who? Ann"]),
        ("Who?", None, [], ["Who?"]),
        ("Who?", ["Ann", "Bob"], 0, ["Who? Ann", "Who? Bob"]),
    ],
)
def test_every_shape_of_question_gives_all_that_is_scored(text, choices, target, expected):
    task = SimpleNamespace(
        OUTPUT_TYPE="multiple_choice",
        config=SimpleNamespace(doc_to_choice=choices),
        doc_to_text=lambda document: text,
        doc_to_choice=lambda document: choices,
        doc_to_target=lambda document: target,
    )
    assert evaluation_text._of_document(task, {}) == expected
