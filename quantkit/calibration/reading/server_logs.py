"""Logs of OpenAI-compatible servers: the request in a row, and its answer."""

from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.calibration.reading.messages import are_messages, parsed

REQUESTS = ("request", "request_body", "body", "kwargs", "payload", "input", "params", "json")
ANSWERS = ("response", "response_body", "output", "body", "result", "message", "chunks")
BESIDE = ("response", "response_body", "output", "result", "completion")
"""Fields that hold the answer beside the request; a text there is the answer itself."""
ANSWER_KEYS = ("content", "tool_calls", "function_call", "refusal")
REPLY = ("choices", "error", "object", "usage", "body")
DEPTH = 4


def request(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The body with `messages` or `prompt` in a log row."""
    return _request(row, DEPTH)


def answer(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The assistant's answer, if a row keeps it beside the request."""
    for key in BESIDE:
        if found := _answer(value := row.get(key), DEPTH):
            return found
        if isinstance(value, str) and value.strip() and not _is_reply(value):
            return {"role": "assistant", "content": value}
    return _answer({"choices": row["choices"]}, 0) if "choices" in row else None


def _request(value: Any, depth: int, inside: bool = False) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        value = parsed(value)
    if inside and are_messages(value):
        return {"messages": value}
    if not isinstance(value, dict):
        return None
    if inside and (
        isinstance(value.get("messages"), list) or isinstance(value.get("prompt"), str | list)
    ):
        return value
    for key in REQUESTS if depth else ():
        if key in value and (found := _request(value[key], depth - 1, inside=True)):
            return found
    return None


def _answer(value: Any, depth: int) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        value = _events(value) or parsed(value)
    if isinstance(value, list):
        if are_messages(value):
            return value[-1] if value[-1].get("role") == "assistant" else None
        return _joined(chunk for chunk in value if isinstance(chunk, dict | str))
    if not isinstance(value, dict):
        return None
    choices = value.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        first = choices[0]
        if isinstance(message := first.get("message"), dict):
            # An answer that was cut off during reasoning says nothing.
            has_content = any(message.get(key) for key in ANSWER_KEYS)
            return {"role": "assistant", **message} if has_content else None
        if isinstance(first.get("text"), str):
            return {"role": "assistant", "content": first["text"]}
        return _joined([value])
    if value.get("role") == "assistant":
        return value
    for key in ANSWERS if depth else ():
        if key in value and (found := _answer(value[key], depth - 1)):
            return found
    return None


def _is_reply(text: str) -> bool:
    """Whether a text is the server's response; other JSON is what a model was asked to write."""
    value = parsed(text)
    return bool(_events(text)) or (isinstance(value, dict) and any(key in value for key in REPLY))


def _events(text: str) -> list[Any]:
    """The chunks of a stream that was logged verbatim."""
    if not text.lstrip().startswith("data:"):
        return []
    lines = (line.strip() for line in text.splitlines())
    return [
        chunk
        for line in lines
        if line.startswith("data:") and (chunk := parsed(line.removeprefix("data:")))
    ]


def _joined(chunks: Iterable[Any]) -> Mapping[str, Any] | None:
    """The message that a stream's chunks add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if isinstance(chunk, str):
            chunk = parsed(chunk.strip().removeprefix("data:")) or {}
        choices = chunk.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict) or first.get("index", 0) != 0:
            continue
        delta = first.get("delta")
        if not isinstance(delta, dict):
            delta = {"content": first.get("text")}
        for kept, key in ((content, "content"), (reasoning, "reasoning_content")):
            if isinstance(piece := delta.get(key), str):
                kept.append(piece)
        for call in delta.get("tool_calls") or ():
            _add_call(calls, call)
    if not content and not calls:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def _add_call(calls: dict[int, dict[str, Any]], piece: Mapping[str, Any]) -> None:
    """The first piece of a call names it, later ones carry its arguments."""
    call = calls.setdefault(
        piece.get("index", 0), {"type": "function", "function": {"name": "", "arguments": ""}}
    )
    if isinstance(piece.get("id"), str):
        call["id"] = piece["id"]
    for key, value in (piece.get("function") or {}).items():
        if key in ("name", "arguments") and isinstance(value, str):
            call["function"][key] += value
