"""docs/choosing.md shows what the program prints; scripts/write_choosing_page.py makes it so."""

import importlib.util
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("page", ROOT / "scripts/write_choosing_page.py")
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)
SHOWN = script.SHOWN.findall(script.PAGE.read_text())


def test_the_page_shows_several_decisions():
    assert len(SHOWN) >= 3


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=lambda value: value[:40])
def test_the_page_shows_what_is_printed(run_cli, monkeypatch, tmp_path, command, shown):
    script.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = run_cli(shlex.split(command))
    assert result.code == shown.split("\n")[0].endswith("no format fits")
    assert words(result.stdout) == words(shown), "run: make docs"


def words(text: str) -> list[str]:
    """Without line breaks and rules, which depend on the terminal."""
    return [word for word in text.split() if not set(word) <= {"─"}]


def test_thirty_questions_have_the_answers_of_today(tmp_path):
    questions = script.questions
    assert len(questions.QUESTIONS) == 30
    answers = questions.table(tmp_path)
    assert script.TABLE.search(script.PAGE.read_text())[0].split("\n", 1)[1].startswith(answers), (
        "run: make docs"
    )


def test_thirty_questions_can_be_typed(run_cli, monkeypatch):
    asked = []
    answer = script.questions.answer

    def seen(question):
        asked.append(question)
        return answer(replace(question, models=("1B",), drafting=None, in_depth=False))

    monkeypatch.setattr("quantkit.serving.questions.answer", seen)
    for text, question in script.questions.QUESTIONS:
        run_cli(script.questions.arguments(question))
        typed = asked.pop()
        host = typed.host and replace(typed.host, name=question.host.name)
        assert replace(typed, host=host, in_depth=question.in_depth) == question, text
