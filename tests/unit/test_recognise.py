"""Rows are what their fields say, in every dialect people keep them in."""

import json

import pytest

from quantkit.calibration import spec
from quantkit.calibration.reading.recognise import SHOWN_CHARACTERS, Empty, Recogniser, Unrecognised
from quantkit.calibration.reading.record import Record
from quantkit.errors import DataError, UnknownName

USER = {"role": "user", "content": "What is 2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be short."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
}


def recognise(value, columns=None, kind=None):
    return Recogniser("ours", columns or {}, kind)(Record("file.jsonl:7", value))


def said(value, **options):
    """Kind, and who says what."""
    row = recognise(value, **options)
    return row.kind, [(m["role"], m["content"]) for m in row.messages] or row.text


SIMPLE = [("user", "What is 2 + 2?"), ("assistant", "4")]


def test_rows_know_their_source_and_place():
    row = recognise({"text": "a"})
    assert (row.source, row.place, row.kind, row.text) == ("ours", "file.jsonl:7", "text", "a")


def test_openai_messages_keep_tools_and_their_calls():
    messages = [
        {"role": "developer", "content": "Be short."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        ASSISTANT,
    ]
    row = recognise({"messages": messages, "tools": [TOOL], "id": 3})
    assert row.kind == "chat"
    assert row.messages == [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        ASSISTANT,
    ]
    assert row.tools == [TOOL]


def test_parts_of_a_message_become_text_and_references_to_images():
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_text", "text": "this?"},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
        {"type": "image", "image": "photos/1.jpg"},
        {"type": "input_image", "image_url": "2.png"},
        {"type": "image"},
    ]
    row = recognise({"messages": [{"role": "user", "content": parts}]})
    images = ["data:image/png;base64,AAAA", "photos/1.jpg", "2.png"]
    assert row.messages == [{"role": "user", "content": "What is\nthis?", "images": images}]
    assert row.without_images.messages == [{"role": "user", "content": "What is\nthis?"}]


def test_the_older_function_calls_become_tool_calls():
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "4"},
    ]
    row = recognise({"messages": messages, "functions": [{"name": "add", "parameters": {}}]})
    assert row.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    ]
    assert row.messages[2] == {"role": "tool", "content": "4", "name": "add"}
    assert row.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_fields_that_a_table_fills_with_nothing_are_dropped():
    padded = {"tool_calls": None, "tool_call_id": None, "name": None}
    row = recognise({"messages": [USER | padded, ASSISTANT | padded], "tools": None})
    assert row.messages == [USER, ASSISTANT]
    assert recognise({"messages": None, "prompt": None, "text": "a"}).text == "a"
    assert recognise({"messages": [], "text": "a"}).text == "a"


def test_messages_written_as_text_are_read():
    assert said({"messages": json.dumps([USER, ASSISTANT])}) == ("chat", SIMPLE)


def test_reasoning_is_kept():
    answer = {"role": "assistant", "content": "4", "reasoning": "two and two"}
    row = recognise({"messages": [USER, answer]})
    assert row.messages[1] == ASSISTANT | {"reasoning_content": "two and two"}


def test_a_bare_list_of_messages_is_a_chat():
    assert said([USER, ASSISTANT]) == ("chat", SIMPLE)


SHAREGPT = [
    {"from": "human", "value": "What is 2 + 2?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "4"},
]


def test_sharegpt_with_tools():
    row = recognise(
        {"conversations": SHAREGPT, "system": "Be short.", "tools": json.dumps([{"name": "add"}])}
    )
    assert [m["role"] for m in row.messages] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = row.messages[2]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert row.messages[2]["content"] == ""
    assert row.tools == [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    ("human", "machine"), [("human", "gpt"), ("user", "bot"), ("Human", "model"), ("human", "ai")]
)
@pytest.mark.parametrize("field", ["conversations", "conversation", "messages"])
def test_names_of_roles(field, human, machine):
    turns = [{"from": human, "value": "What is 2 + 2?"}, {"from": machine, "value": "4"}]
    assert said({field: turns}) == ("chat", SIMPLE)


def test_conversations_with_role_and_content():
    assert said({"conversation": [USER, ASSISTANT]}) == ("chat", SIMPLE)


INSTRUCTIONS = {
    "alpaca": {"instruction": "What is 2 + 2?", "input": "", "output": "4", "text": "Below is"},
    "dolly": {"instruction": "What is 2 + 2?", "context": "", "response": "4", "category": "qa"},
    "question": {"question": "What is 2 + 2?", "answer": "4"},
    "answers": {"question": "What is 2 + 2?", "answers": ["4", "four"]},
    "squad": {"question": "What is 2 + 2?", "answers": {"text": ["4"], "answer_start": [1]}},
    "choices": {"question": "What is 2 + 2?", "choices": ["3", "4"], "answer": 1},
    "number": {"question": "What is 2 + 2?", "answer": 4},
    "completion": {"prompt": "What is 2 + 2?", "completion": "4"},
    "response": {"prompt": "What is 2 + 2?", "response": "4"},
    "response object": {
        "prompt": "What is 2 + 2?",
        "response": {"choices": [{"message": ASSISTANT}]},
    },
    "chosen": {"prompt": "What is 2 + 2?", "chosen": "4", "rejected": "5"},
    "output": {"prompt": "What is 2 + 2?", "output": "4"},
    "input and output": {"input": "What is 2 + 2?", "output": "4"},
    "inputs and targets": {"inputs": "What is 2 + 2?", "targets": "4"},
}


@pytest.mark.parametrize("case", INSTRUCTIONS)
def test_instructions_are_one_turn_each(case):
    assert said(INSTRUCTIONS[case]) == ("instruction", SIMPLE)


@pytest.mark.parametrize("field", ["input", "context"])
def test_what_belongs_to_an_instruction_follows_a_blank_line(field):
    row = recognise({"instruction": "Sum up.", field: "A long story.", "output": "Short."})
    assert row.messages[0]["content"] == "Sum up.\n\nA long story."


def test_squad_brings_its_context():
    value = {"context": "It is 4.", "question": "What?", "answers": {"text": ["4"]}, "title": "x"}
    assert said(value) == ("instruction", [("user", "What?\n\nIt is 4."), ("assistant", "4")])


@pytest.mark.parametrize("answer", ["", None, [], {"text": []}])
def test_an_empty_answer_is_no_message(answer):
    assert said({"question": "What is 2 + 2?", "answer": answer}) == ("instruction", SIMPLE[:1])
    assert said({"prompt": "What is 2 + 2?"}) == ("instruction", SIMPLE[:1])


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": "4"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT]},
        {"prompt": "What is 2 + 2?", "chosen": [USER, ASSISTANT], "rejected": [USER]},
        {"prompt": "What is 2 + 2?", "chosen": [ASSISTANT]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]},
    ],
)
def test_preferences_and_prompts_may_be_messages(value):
    assert said(value) == ("chat", SIMPLE)


@pytest.mark.parametrize("field", ["text", "content", "document", "page", "body", "code"])
def test_text_goes_by_many_names(field):
    assert said({field: "words", "url": "x"}) == ("text", "words")


def test_strings_are_text():
    assert said("words") == ("text", "words")


BODY = {"model": "m", "messages": [SYSTEM, USER], "tools": [TOOL]}
REPLY = {"id": "x", "choices": [{"index": 0, "message": ASSISTANT, "finish_reason": "stop"}]}
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "4"}}]},
    {"choices": [{"index": 1, "delta": {"content": "another choice"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"total_tokens": 3}},
]
LOGS = {
    "proxy": {"timestamp": 1, "request": {"body": BODY}, "response": {"body": REPLY}},
    "request": {"request": BODY, "response": REPLY},
    "body as text": {"request_body": json.dumps(BODY), "response_body": json.dumps(REPLY)},
    "text inside": {"request": {"body": json.dumps(BODY)}, "response": {"body": json.dumps(REPLY)}},
    "kwargs": {"kwargs": BODY, "response": REPLY},
    "payload": {"payload": BODY, "output": ASSISTANT},
    "input": {"input": BODY, "output": REPLY},
    "plain answer": {"request": BODY, "response": "4"},
    "flat": BODY | {"response": REPLY},
    "flat choices": BODY | {"choices": REPLY["choices"]},
    "chunks": {"request": BODY, "response": CHUNKS},
    "chunks below": {"request": BODY, "response": {"body": CHUNKS}},
    "events": {
        "request": BODY,
        "response": "".join(f"data: {json.dumps(c)}\n\n" for c in CHUNKS) + "data: [DONE]\n\n",
    },
}


@pytest.mark.parametrize("case", LOGS)
def test_logs_give_the_request_and_its_answer(case):
    row = recognise(LOGS[case])
    assert row.kind == "chat"
    assert row.messages == [SYSTEM, USER, ASSISTANT]
    assert row.tools == [TOOL]


def test_batch_files_give_their_requests():
    value = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    assert recognise(value).messages == [SYSTEM, USER]


def test_a_list_of_messages_may_be_the_input():
    assert said({"input": [USER], "output": ASSISTANT}) == ("chat", SIMPLE)
    answer = {"type": "message", "content": [{"type": "output_text", "text": "4"}]}
    value = {"request": {"input": [USER]}, "response": {"output": [answer | {"role": "assistant"}]}}
    assert said(value) == ("chat", SIMPLE)


@pytest.mark.parametrize(
    "response",
    [
        None,
        "",
        {"error": {"message": "too many requests"}},
        {"message": "too many requests", "code": 429},
        {"choices": []},
        '{"error": {"message": "too many requests"}}',
        {"choices": [{"message": {"role": "assistant", "content": None}}]},
    ],
)
def test_a_request_without_an_answer_stays_one(response):
    assert recognise({"request": BODY, "response": response}).messages == [SYSTEM, USER]


@pytest.mark.parametrize("answer", ['{"sum": 4}', "[4]", "{4"])
def test_an_answer_in_json_is_an_answer(answer):
    expected = ("chat", [SIMPLE[0], ("assistant", answer)])
    assert said({"messages": [USER], "response": answer}) == expected
    assert said({"prompt": [USER], "completion": answer}) == expected
    assert said({"prompt": "What is 2 + 2?", "completion": answer})[1] == expected[1]


def test_an_answer_is_not_said_twice():
    assert said({"messages": [USER, ASSISTANT], "response": "4"}) == ("chat", SIMPLE)


def test_streamed_tool_calls_are_joined():
    pieces = [
        {"index": 0, "id": "call_1", "function": {"name": "add", "arguments": ""}},
        {"index": 1, "id": "call_2", "function": {"name": "sub", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": '{"a": 2, '}},
        {"index": 0, "function": {"arguments": '"b": 2}'}},
    ]
    chunks = [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces]
    answer = recognise({"request": BODY, "response": chunks}).messages[-1]
    assert answer["tool_calls"][0] == CALL
    assert answer["tool_calls"][1]["function"] == {"name": "sub", "arguments": "{}"}


@pytest.mark.parametrize("prompt", ["Once upon", ["Once upon"]])
@pytest.mark.parametrize("pack", [dict, json.dumps])
def test_logged_completions_are_text_as_the_model_saw_it(prompt, pack):
    body = pack({"model": "m", "prompt": prompt})
    value = {"body": body, "response": {"choices": [{"text": " a time"}]}}
    assert said(value) == ("text", "Once upon a time")


def test_columns_say_which_field_is_which():
    assert said({"conv": [USER, ASSISTANT]}, columns={"messages": "conv"}) == ("chat", SIMPLE)
    value = {"q": "What is 2 + 2?", "a": "4", "text": "other"}
    columns = {"prompt": "q", "completion": "a"}
    assert said(value, columns=columns) == ("instruction", SIMPLE)
    assert said({"body": "x", "text": "y"}, columns={"text": "body"}) == ("text", "x")


def test_columns_reach_into_objects_and_json():
    columns = {"messages": "event.call.messages", "response": "event.reply"}
    value = {"event": {"call": json.dumps({"messages": [USER]}), "reply": REPLY}}
    assert said(value, columns=columns) == ("chat", SIMPLE)
    assert said({"a.b": "x"}, columns={"text": "a.b"}) == ("text", "x")
    assert said({"turns": [{"t": "x"}]}, columns={"text": "turns.0.t"}) == ("text", "x")


def test_columns_know_their_names():
    with pytest.raises(UnknownName, match="messages"):
        Recogniser("ours", {"mesages": "conv"})


def test_columns_that_a_row_lacks_are_named():
    with pytest.raises(Unrecognised, match="names conv, which it does not have"):
        recognise({"messages": [USER]}, columns={"messages": "conv"})


def test_a_kind_may_be_forced():
    value = {"messages": [USER, ASSISTANT], "prompt": "What is 2 + 2?", "text": "both"}
    assert said(value, kind="text") == ("text", "both")
    assert recognise(value, kind="chat").kind == "chat"
    assert recognise(value, kind="instruction").kind == "instruction"
    with pytest.raises(Unrecognised, match="is not of kind chat"):
        recognise("words", kind="chat")


def test_an_unknown_row_is_shown_with_its_fields():
    with pytest.raises(Unrecognised) as caught:
        recognise({"label": 3, "premise": "p" * 10_000_000})
    message = str(caught.value)
    assert message.startswith("file.jsonl:7: ")
    assert "(label, premise)" in message
    assert "`text`, `messages`" in message
    assert '{"label": 3, "premise": "ppp' in message
    assert len(message) < SHOWN_CHARACTERS + 250


@pytest.mark.parametrize("value", [[1, 2], [], ["words"], {}, {"text": 3}, {"row": {"label": 1}}])
def test_what_is_no_row_is_told(value):
    with pytest.raises(Unrecognised, match=r"file\.jsonl:7"):
        recognise(value)


def test_rows_of_the_hub_viewer_are_unwrapped():
    assert said({"row_idx": 0, "row": {"text": "x"}}) == ("text", "x")


@pytest.mark.parametrize(
    "value",
    [
        "",
        " \n",
        {"text": ""},
        {"messages": []},
        {"messages": [SYSTEM]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"conversations": []},
        {"instruction": "", "input": "", "output": "x"},
        {"prompt": " ", "completion": "x"},
        {"request": {"body": {"messages": []}}},
        {"body": {"prompt": ""}},
    ],
)
def test_rows_that_say_nothing_are_empty(value):
    with pytest.raises(Empty, match=r"file\.jsonl:7") as caught:
        recognise(value)
    assert isinstance(caught.value, DataError)
    assert not isinstance(caught.value, Unrecognised)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "message 2 has no role"),
        ({"role": 3, "content": "x"}, "message 2 has no role"),
        ({"role": "critic", "content": "x"}, "message 2 has the role 'critic'"),
        ({"role": "user"}, "message 2 has no content"),
        ({"role": "user", "content": 3}, "the content of message 2 is a number"),
        ({"role": "user", "content": {"a": 1}}, "the content of message 2 is an object"),
        ({"role": "user", "content": [3]}, "the content of message 2 is a list"),
        ("words", "message 2 is a text, not an object"),
        ({"role": "assistant", "tool_calls": [{}]}, "a tool call of message 2 names no function"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "the tool calls of message 2 are an obj"),
    ],
)
def test_wrong_messages_are_named(message, reason):
    with pytest.raises(Unrecognised) as caught:
        recognise({"messages": [USER, message]})
    assert f"file.jsonl:7: {reason}" in str(caught.value)


@pytest.mark.parametrize("tools", ["words", ["add"], {"name": "add"}])
def test_wrong_tools_are_told(tools):
    with pytest.raises(Unrecognised, match="its tools are"):
        recognise({"messages": [USER], "tools": tools})


def test_the_given_row_is_left_as_it_is():
    value = {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}], "tools": [TOOL]}
    before = json.dumps(value)
    recognise(value)
    assert json.dumps(value) == before


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"id": "a", "said": "Two words or more."}, "text"),
        ({"id": 3, "event": {"at": "x", "note": "Two words or more."}}, "text"),
        ({"id": "a", "talk": [USER, ASSISTANT]}, "chat"),
    ],
)
def test_the_columns_that_an_error_offers_work(tmp_path, value, kind):
    """The advice, written to a file, is a set that reads the row."""
    declared = 'kind: "files", path: "odd.jsonl"'
    with pytest.raises(Unrecognised) as caught:
        Recogniser("odd.jsonl", declared=declared)(Record("odd.jsonl:1", value))
    message = str(caught.value)
    assert "calibrate build" in message
    (tmp_path / "set.yaml").write_text(message[message.index("sources:") :].split("`")[0])
    (source,) = spec.read(tmp_path / "set.yaml").sources
    assert source.path == "odd.jsonl"
    assert recognise(value, columns=source.columns).kind == kind
