"""Recognises rows by their fields: a chat, an instruction, plain text, or a server's log.

    messages                         OpenAI chat, with `tools` beside it
    conversations                    ShareGPT: from/value
    instruction, input, output       Alpaca
    instruction, context, response   Dolly
    question, answer, context        question answering, including SQuAD
    prompt, completion / chosen      completions and preferences; both may be messages
    request, body, payload, ...      logs, with the answer under `response`
    text, content, document, ...     plain text

The first match in the order of the code wins; `columns` decides where names differ.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.calibration.reading import server_logs
from quantkit.calibration.reading.messages import (
    Malformed,
    are_messages,
    normalise,
    parsed,
    says_something,
    tools,
)
from quantkit.calibration.reading.record import Record
from quantkit.calibration.reading.row import Kind, Row
from quantkit.errors import DataError, UnknownName

SHOWN_CHARACTERS = 200
QUOTES = "; the row is "
"""Precedes the row's content in an error."""
CHATS = ("messages", "conversations", "conversation", "dialog", "dialogue")
TEXTS = (
    *("text", "content", "document", "page", "body", "code", "article", "passage"),
    *("markdown", "raw_content", "page_content"),
)
ANSWERS = ("completion", "response", "chosen", "output", "answer", "text")
# The question, its context, and where its answer may be, best first.
INSTRUCTIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("instruction", ("input", "context"), ("output", "response", "completion", "answer")),
    ("question", ("context", "input"), ("answer", "answers", "response", "output")),
    ("prompt", ("context", "input"), ANSWERS),
    ("inputs", (), ("targets",)),
    ("input", (), ("output", "target")),
)
NEEDS_ANSWER = ("inputs", "input")
"""Names that mean a question only if there is an answer."""
COLUMNS = frozenset(
    {*CHATS, *TEXTS, *server_logs.REQUESTS, *server_logs.BESIDE, "tools", "system"}
    | {name for ask, more, answers in INSTRUCTIONS for name in (ask, *more, *answers)}
)


Found = dict[str, Any]
"""What is found in a row: `messages` and `tools`, or `text`."""


class Unrecognised(DataError):
    """A row with unknown fields, or with invalid messages."""


class Empty(DataError):
    """A row that was recognised but is empty."""


class _Nothing(Exception):
    """A recognised but empty field; carries its name."""


@dataclass(frozen=True)
class Recogniser:
    """Turns the records of one source into rows."""

    source: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our field name -> theirs; dots reach into objects: `request.body.messages`."""
    kind: Kind | None = None
    """Accept only this kind, if a row could be read in several ways."""
    declared: str = ""
    """The source as the set's file names it; empty where no such file is read."""

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in COLUMNS:
                raise UnknownName("column", name, COLUMNS)

    def __call__(self, record: Record) -> Row:
        value = record.value
        try:
            row = self._row(record.place, value)
        except Malformed as error:
            raise Unrecognised(f"{record.place}: {error}{QUOTES}{shown(value)}") from error
        except _Nothing as error:
            raise Empty(f"{record.place}: {error}") from None
        if row is None:
            raise self._unrecognised(record)
        return row

    def _row(self, place: str, value: Any) -> Row | None:
        if isinstance(value, list):
            value = {"messages": value} if are_messages(value) else None
        elif isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, dict):
            return None
        if self.columns:
            value = self._renamed(value)
        empty = None
        for kind, shape in SHAPES:
            if self.kind not in (None, kind):
                continue
            try:
                found = shape(value)
            except _Nothing as error:
                # Tables have all columns in every row, and fill only those that apply.
                empty = empty or error
                continue
            if found is not None:
                return Row(self.source, place, kind, **found)
        if isinstance(inner := value.get("row"), dict):
            # The hub's viewer wraps each row in an object.
            return self._row(place, inner)
        if empty:
            raise empty
        return None

    def _renamed(self, value: Mapping[str, Any]) -> dict[str, Any]:
        found = {ours: reach(value, theirs) for ours, theirs in self.columns.items()}
        return {ours: held for ours, held in found.items() if held is not None}

    def _unrecognised(self, record: Record) -> Unrecognised:
        value = record.value
        what = f"the row is not of kind {self.kind}" if self.kind else "the row is of no known kind"
        hint = "give it fields such as `text`, `messages`, or `prompt` and `completion`"
        if isinstance(value, dict):
            if self.declared:
                hint = (
                    "`columns:` in the set's YAML file says which field is which, such as "
                    f"`sources: [{{{self.declared}, columns: {{{_example(value)}}}}}]`; then "
                    "`quantkit calibrate build FILE.yaml --model MODEL -o DIR`"
                )
            fields = ", ".join(str(name)[:40] for name in list(value)[:20]) or "none"
            what += f" by its fields ({fields})"
            absent = [theirs for theirs in self.columns.values() if reach(value, theirs) is None]
            if absent:
                names = ", ".join(absent)
                hint = f"`columns:` in the set's file names {names}, which it does not have"
        return Unrecognised(f"{record.place}: {what}; {hint}{QUOTES}{shown(value)}")


def _example(value: Mapping[str, Any]) -> str:
    """A column for the messages of a row, or for its longest text, at most one object deep."""
    fields = {str(name): held for name, held in value.items()}
    for name, held in value.items():
        fields |= {f"{name}.{k}": v for k, v in held.items()} if isinstance(held, dict) else {}
    if chats := [name for name, held in fields.items() if are_messages(held)]:
        return f"messages: {json.dumps(chats[0])}"
    texts = {name: len(held) for name, held in fields.items() if isinstance(held, str)}
    return f"text: {json.dumps(max(texts, key=texts.__getitem__))}" if texts else "text: FIELD"


def reach(value: Any, path: str) -> Any:
    """The value at a dotted path, through objects, lists and JSON written as text."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for part in path.split("."):
        if isinstance(value, str):
            value = parsed(value)
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def shown(value: Any) -> str:
    """A row for display, shortened."""
    text = json.dumps(_short(value), ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def _short(value: Any) -> Any:
    """The beginning of a value, so that a row of megabytes is not formatted only to be cut."""
    if isinstance(value, dict):
        return {str(key)[:40]: _short(held) for key, held in list(value.items())[:20]}
    if isinstance(value, list):
        return [_short(held) for held in value[:3]]
    if isinstance(value, str | bytes):
        return value[:80] if isinstance(value, str) else f"{len(value)} bytes"
    return value


def _chat(row: Mapping[str, Any]) -> Found | None:
    for key in CHATS:
        messages = row.get(key)
        if isinstance(messages, str):
            messages = parsed(messages)
        if messages == []:
            raise _Nothing(f"its {key} are empty")
        if isinstance(messages, list) and (key == "messages" or are_messages(messages)):
            return _finished(messages, row, row)
    prompt = row.get("prompt")
    before: list[Mapping[str, Any]] = prompt if are_messages(prompt) else []
    if isinstance(prompt, str) and prompt.strip():
        before = [{"role": "user", "content": prompt}]
    for key in ANSWERS:
        if are_messages(completion := row.get(key)):
            # Preferences hold the whole chat, or only the answer to the prompt.
            answers_only = completion[0].get("role", completion[0].get("from")) in (
                "assistant",
                "gpt",
            )
            return _finished([*before, *completion] if answers_only else completion, row)
    if are_messages(prompt):
        return _finished(prompt, row, {"response": _answer(row, ANSWERS)})
    return None


def _logged_chat(row: Mapping[str, Any]) -> Found | None:
    logged = server_logs.request(row)
    if logged is None or "messages" not in logged:
        return None
    messages = logged["messages"]
    if not messages:
        raise _Nothing("its request has no messages")
    return _finished(messages, logged, row)


def _finished(
    given: Sequence[Any], beside: Mapping[str, Any], log: Mapping[str, Any] | None = None
) -> Found:
    """Messages in our form, followed by the answer from a log if they end with the user."""
    messages = normalise(given)
    if log and messages[-1]["role"] != "assistant" and (answer := server_logs.answer(log)):
        messages += normalise([answer], first=len(messages) + 1)
    system = beside.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not says_something(messages):
        raise _Nothing("all its messages are empty")
    return {
        "messages": messages,
        "tools": tools(beside.get("tools") or beside.get("functions")),
    }


def _instruction(row: Mapping[str, Any]) -> Found | None:
    for ask, more, answers in INSTRUCTIONS:
        asked = row.get(ask)
        if not isinstance(asked, str):
            continue
        answer = _answer(row, answers)
        if ask in NEEDS_ANSWER and (answer is None or parsed(asked)):
            continue
        given = [asked, *(row[name] for name in more if isinstance(row.get(name), str))]
        user = "\n\n".join(part for part in given if part.strip())
        if not user:
            raise _Nothing(f"its {ask} is empty")
        messages = [{"role": "user", "content": user}]
        if isinstance(system := row.get("system"), str) and system.strip():
            messages.insert(0, {"role": "system", "content": system})
        if answer and answer.strip():
            messages.append({"role": "assistant", "content": answer})
        return {"messages": messages}
    return None


def _answer(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The answer of a row; None if it has no field for one."""
    for name in names:
        if name not in row:
            continue
        answer = row[name]
        if isinstance(answer, dict) and "choices" in answer:
            answer = server_logs.answer({"response": answer}) or ""
        if isinstance(answer, dict):
            # SQuAD keeps every annotator's answer, and its position in the text.
            answer = answer.get("text", answer.get("content"))
        if isinstance(answer, list):
            answer = next((one for one in answer if isinstance(one, str)), "")
        choices = row.get("choices")
        if isinstance(answer, int) and isinstance(choices, list) and 0 <= answer < len(choices):
            answer = choices[answer]
        return "" if answer is None else str(answer)
    return None


def _completion(row: Mapping[str, Any]) -> Found | None:
    """A logged completion, whose prompt reached the model without a template."""
    logged = server_logs.request(row)
    prompt = logged.get("prompt") if logged else None
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return None
    answer = (server_logs.answer(row) or {}).get("content")
    if not prompt.strip():
        raise _Nothing("the prompt of its request is empty")
    return {"text": prompt + answer if isinstance(answer, str) else prompt}


def _text(row: Mapping[str, Any]) -> Found | None:
    texts = {name: row[name] for name in TEXTS if isinstance(row.get(name), str)}
    for text in texts.values():
        if text.strip():
            return {"text": text}
    if texts:
        raise _Nothing(f"its {next(iter(texts))} is empty")
    return None


SHAPES: tuple[tuple[Kind, Callable[[Mapping[str, Any]], Found | None]], ...] = (
    ("chat", _chat),
    ("instruction", _instruction),
    ("chat", _logged_chat),
    ("text", _completion),
    ("text", _text),
)
