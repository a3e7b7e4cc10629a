"""The questions of `python_quiz`: fair, the same every time, and not from training text."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from quantkit.calibration.reading import python_text
from quantkit.scoring.tasks.python_quiz import questions as quiz


@pytest.fixture(scope="module")
def questions():
    return quiz.questions()


def right(question) -> str:
    return question["choices"][question["answer"]]


def test_there_are_enough_questions_of_both_kinds(questions):
    assert len(questions) == quiz.N_QUESTIONS
    kinds = Counter(question["document"].split(":")[0] for question in questions)
    assert min(kinds["topic"], kinds["docstrings"]) >= 30


def test_the_right_choice_is_what_follows_in_its_document(questions):
    texts = {document.name: document.text for document in python_text.heldout()}
    for question in questions:
        text = texts[question["document"]]
        assert f"{question['question']} {right(question)}" in text
        assert len(question["question"].splitlines()) == 2
        for choice in question["choices"]:
            assert (choice in text) == (choice == right(question))


def test_wrong_choices_end_lines_of_other_documents_of_the_same_kind(questions):
    documents = python_text.heldout()
    for question in questions[:50]:
        kind = question["document"].split(":")[0]
        others = [d for d in documents if d.kind == kind and d.name != question["document"]]
        for choice in set(question["choices"]) - {right(question)}:
            assert any(f" {choice}\n" in document.text for document in others)


def test_no_choice_stands_out(questions):
    for question in questions:
        choices = question["choices"]
        assert len({choice.lower() for choice in choices}) == 4
        assert {len(choice.split()) for choice in choices} == {quiz.ENDING_WORDS}
        near = quiz.LENGTH_TOLERANCE
        assert all(abs(len(choice) - len(right(question))) <= near for choice in choices)
    places = Counter(question["answer"] for question in questions)
    assert all(0.15 <= places[place] / len(questions) <= 0.35 for place in range(4)), places


def test_no_answer_and_no_question_comes_twice(questions):
    assert len({right(question).lower() for question in questions}) == len(questions)
    assert len({question["question"] for question in questions}) == len(questions)


def test_nothing_asked_stands_in_training_or_calibration_text(questions):
    training = " ".join(" ".join(document.text.split()) for document in python_text.train())
    for question in questions:
        assert python_text.split_of(_owner(question["document"])) == "heldout"
        line = f"{question['question'].splitlines()[1]} {right(question)}"
        assert " ".join(line.split()) not in training, line


def test_another_process_asks_the_same(questions):
    program = (
        "import json; from quantkit.scoring.tasks.python_quiz import questions; "
        "print(json.dumps(questions.questions()))"
    )
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True
    )
    assert json.loads(answer.stdout) == questions


def _owner(name: str) -> str:
    """The topic or top-level module whose hash decides on the split."""
    kind, _, rest = name.partition(":")
    return name if kind == "topic" else f"module:{rest.split('.')[0]}"
