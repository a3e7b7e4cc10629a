"""Judges of answers, each against what it must take and must refuse."""

import json

import pytest

from quantkit.errors import DataError
from quantkit.scoring import following, judging

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("row", "answer", "is_right"),
    [
        ({"reference": "42"}, " 42\n", True),
        ({"reference": "42"}, "42.", False),
        ({"reference": ["yes", "Yes"]}, "Yes", True),
        ({"regex": r"\b4\d\b"}, "It is 42.", True),
        ({"regex": r"^4\d$"}, "It is 42.", False),
        ({"schema": PERSON}, '{"age": 3}', True),
        ({"schema": PERSON}, '```json\n{"age": 3}\n```', True),
        ({"schema": PERSON}, 'Here it is: {"age": 3}', False),
        ({"schema": PERSON}, '{"age": "3"}', False),
        ({"schema": PERSON}, '{"age": 3', False),
        ({"judge": "json"}, "[1, 2]", True),
        ({"judge": "json"}, "[1, 2", False),
    ],
)
def test_rules(row, answer, is_right):
    judge = judging.of_row("here", row, (), None, None)
    assert judge.is_right(answer) is is_right


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>', True),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}', True),
        ('{"name": "weather", "parameters": {"city": "Bern", "days": 2}}', True),
        ('[{"name": "weather", "arguments": {"city": "Bern"}}]', True),
        ('{"function": {"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}}', True),
        ('<tool_call>{"name": "weather", "arguments": {"days": 2}}</tool_call>', False),
        ('<tool_call>{"name": "weather", "arguments": {"city": 2}}</tool_call>', False),
        ('<tool_call>{"name": "rain", "arguments": {"city": "Bern"}}</tool_call>', False),
        ('<tool_call>{"name": "weather", "arguments": [}</tool_call>', False),
        ("It will rain in Bern.", False),
        ("[1, 2]", False),
        ("", False),
    ],
)
def test_tool_calls(answer, is_right):
    judge = judging.of_row("here", {"judge": "tool-calls"}, [WEATHER], None, None)
    assert judge.is_right(answer) is is_right


@pytest.mark.parametrize(
    ("row", "wanted", "message"),
    [
        ({"judge": "taste"}, None, "'taste'; choose from exact"),
        ({"reference": 4}, None, "no answer to compare with"),
        ({}, "exact", "no answer to compare with"),
        ({"regex": "("}, None, "cannot be used"),
        ({"schema": {"type": "nothing"}}, None, "invalid JSON schema"),
        ({}, "tool-calls", "no tools"),
    ],
)
def test_judges_that_cannot_judge_are_named(row, wanted, message):
    with pytest.raises(DataError, match=message) as found:
        judging.of_row("traffic.jsonl:3", row, (), None, wanted)
    assert "traffic.jsonl:3" in str(found.value)


def test_rows_of_a_file_bring_their_judges(tmp_path):
    file = tmp_path / "traffic.jsonl"
    chat = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}]
    rows = [
        {"text": "Two and two is", "reference": "four"},
        {"messages": chat, "tools": [WEATHER]},
        {"text": "Go on:"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = following.of_file(file)
    assert asked.judged(["four", "42", "x"]) == [(0, "exact_match", True)]
    assert asked.tools == ([], [WEATHER], [])
    assert asked.first(1).judged(["five"]) == [(0, "exact_match", False)]
    file.write_text(json.dumps(rows[1]) + "\n")
    by_all = following.of_file(file, judge="exact")
    assert by_all.judged(["42"]) == [(0, "exact_match", True)]
    assert by_all.hashes != following.of_file(file).hashes
    assert not following.of_file(file).judges
