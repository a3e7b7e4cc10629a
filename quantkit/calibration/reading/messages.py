"""Normalises messages of many dialects to the OpenAI API's form, with contents as plain text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
OURS = ("user", "assistant", "system", "tool")
CALLS = ("function_call", "tool_call")
IMAGE_PARTS = ("image_url", "input_image", "image")
IMAGE_KEYS = ("image_url", "image", "url", "path")
TEXT_PARTS = ("text", "input_text", "output_text")


class Malformed(ValueError):
    """An invalid message or tool; says which and why."""


def normalise(given: Sequence[Any], first: int = 1) -> list[dict[str, Any]]:
    """Messages with known roles and text as content; of images only references are kept."""
    return [_message(number, message) for number, message in enumerate(given, first)]


def are_messages(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    """Whether a value is meant as messages; they may still be wrong."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) for m in value)
        and any("role" in m or "from" in m for m in value)
    )


def says_something(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether anybody but the system speaks or calls a tool."""
    return any(
        m["role"] != "system" and (m["content"].strip() or m.get("tool_calls") or m.get("images"))
        for m in messages
    )


def _message(number: int, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Malformed(f"message {number} is {_kind(given)}, not an object")
    if len(given) == 2 and given.get("role") in OURS and type(given.get("content")) is str:
        return dict(given)  # fast path for nearly all of millions of messages
    role = given.get("role") or given.get("from")
    if not isinstance(role, str):
        raise Malformed(f"message {number} has no role")
    known = ROLES.get(role) or ROLES.get(role.strip().lower())
    if known is None:
        raise Malformed(
            f"message {number} has the role {role[:40]!r}, which is not system, user, "
            "assistant, tool or one of their aliases"
        )
    calls = _calls(number, given)
    content = given.get("content")
    if content is None:
        content = given.get("value")
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if content is None and known == "assistant":
        content = given.get("refusal") or ("" if calls or reasoning else None)
    elif content is None and known == "tool":
        content = ""  # a tool may return nothing
    if role in CALLS and isinstance(content, str) and (written := _written_calls(content)):
        calls, content = [*calls, *written], ""
    message: dict[str, Any] = {"role": known, "content": _text(number, content)}
    if images := _images(content):
        message["images"] = images
    if calls:
        message["tool_calls"] = calls
    if isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if isinstance(kept := given.get(key), str):
            message[key] = kept
    return message


def _text(number: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, str | dict) for part in content):
        # vLLM puts a line break between parts, too.
        return "\n".join(text for part in content if (text := _part(part)))
    if content is None:
        raise Malformed(f"message {number} has no content")
    raise Malformed(f"the content of message {number} is {_kind(content)}, not a text")


def _images(content: Any) -> list[str]:
    """References to the images of a message; their position in the text is not kept."""
    found = []
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") not in IMAGE_PARTS:
            continue
        held = next((part[key] for key in IMAGE_KEYS if part.get(key)), None)
        held = held.get("url") if isinstance(held, dict) else held
        if isinstance(held, str):
            found.append(held)
    return found


def _part(part: str | dict[str, Any]) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if part.get("type", "text") in TEXT_PARTS else None
    return text if isinstance(text, str) else ""


def _calls(number: int, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = given.get("tool_calls")
    if isinstance(calls, str):
        calls = parsed(calls)
    if not calls:
        # The older form of a single function call.
        calls = [once] if isinstance(once := given.get("function_call"), dict) else []
    if not isinstance(calls, list):
        raise Malformed(f"the tool calls of message {number} are {_kind(calls)}, not a list")
    made = [_call(call) for call in calls]
    if None in made:
        raise Malformed(f"a tool call of message {number} names no function")
    return [call for call in made if call]


def _written_calls(text: str) -> list[dict[str, Any]]:
    """The calls that ShareGPT writes as JSON into a turn; none if it is not JSON."""
    value = parsed(text)
    made = [_call(call) for call in (value if isinstance(value, list) else [value])]
    return [] if None in made else [call for call in made if call]


def _call(given: Any) -> dict[str, Any] | None:
    """A call in the API's form, with its arguments as JSON text."""
    if not isinstance(given, dict):
        return None
    function = given.get("function", given)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(identity := given.get("id"), str):
        call = {"id": identity, **call}
    return call


def tools(given: Any) -> list[dict[str, Any]]:
    """Tools in the API's form: under `function`, whatever the dialect."""
    if isinstance(given, str):
        if not given.strip():
            return []
        given = parsed(given)
        if given is None:
            raise Malformed("its tools are a text that is not JSON")
    if not given:
        return []
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise Malformed(f"its tools are {_kind(given)}, not a list of objects")
    return [
        {"type": "function", "function": dict(tool)}
        if "function" not in tool and "name" in tool
        else dict(tool)
        for tool in given
    ]


def parsed(text: str) -> Any:
    """An object or a list written as text; None if it holds neither."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    names |= {int: "a number", float: "a number", type(None): "empty"}
    return names.get(type(value), f"a {type(value).__name__}")
