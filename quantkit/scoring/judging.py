"""Whether an answer is right, decided by a rule: no other model judges.

A row of `--prompts` may have its own: `reference` (a text, or several), `regex`, `schema` (a JSON
schema), or `tools` that a call must fit. `--judge` sets it for all rows.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit import metrics
from quantkit.errors import DataError, MissingDependency

EXACT, REGEX, JSON, TOOL_CALLS = "exact", "regex", "json", "tool-calls"
METRICS = {
    EXACT: metrics.EXACT_MATCH,
    REGEX: "regex_match",
    JSON: "valid_json",
    TOOL_CALLS: "valid_tool_calls",
}
"""The metric of each judge: its share of right answers."""
FENCED = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)
CALLED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Judge:
    """One row's rule."""

    kind: str
    expected: Any
    """Texts, a pattern, a schema or None, or argument schemas by the name of a tool."""

    @property
    def metric(self) -> str:
        return METRICS[self.kind]

    def is_right(self, answer: str) -> bool:
        return RULES[self.kind](answer.strip(), self.expected)

    def to_json(self) -> dict[str, Any]:
        """For the hash of what was asked."""
        return {"kind": self.kind, "expected": self.expected}


def of_row(
    place: str,
    row: Any,
    tools: Sequence[Mapping[str, Any]],
    last_answer: str | None,
    wanted: str | None,
) -> Judge | None:
    """The judge of one row, if it has one; `wanted` is the value of `--judge`."""
    fields = row if isinstance(row, dict) else {}
    if wanted is None:
        named = fields.get("judge")
        if named is not None and named not in METRICS:
            raise DataError(f"{place}: unknown judge {named!r}; choose from {', '.join(METRICS)}")
        inferred = ((EXACT, "reference"), (REGEX, "regex"), (JSON, "schema"))
        wanted = named or next((kind for kind, name in inferred if name in fields), None)
    if wanted == EXACT:
        texts: Any = fields.get("reference", last_answer)
        texts = [texts] if isinstance(texts, str) else texts
        is_list = isinstance(texts, list) and bool(texts)
        if not is_list or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{place} has no answer to compare with; give reference, a text or a list of them"
            )
        return Judge(EXACT, [text.strip() for text in texts])
    if wanted == REGEX:
        return Judge(REGEX, _pattern(place, fields.get("regex")))
    if wanted == JSON:
        schema = fields.get("schema")
        if schema is not None:
            _require_schema(place, schema)
        return Judge(JSON, schema)
    if wanted == TOOL_CALLS:
        return Judge(TOOL_CALLS, _arguments(place, tools))
    return None


def _pattern(place: str, pattern: Any) -> str:
    try:
        return re.compile(pattern).pattern
    except (re.error, TypeError) as error:
        raise DataError(f"{place}: regex {pattern!r} cannot be used: {error}") from error


def _arguments(place: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Argument schemas by name, from tools as in the OpenAI API."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        _require_schema(place, schema)
        found[str(function["name"])] = schema
    if not found:
        raise DataError(f"{place} has no tools that a call could fit; give tools, or another judge")
    return found


def _require_schema(place: str, schema: Any) -> None:
    jsonschema = _library()
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except (jsonschema.SchemaError, AttributeError, TypeError) as error:
        reason = str(getattr(error, "message", error)).splitlines()[0]
        raise DataError(f"{place}: invalid JSON schema: {reason}") from error


def _fits(value: Any, schema: Any) -> bool:
    if not schema:
        return True
    made = _library().validators.validator_for(schema)(schema)
    return bool(made.is_valid(value))


def _library() -> Any:
    try:
        import jsonschema
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "judging by a JSON schema needs the package jsonschema; "
            "install it: pip install jsonschema"
        ) from error
    return jsonschema


def _is_exact(answer: str, texts: Sequence[str]) -> bool:
    return answer in texts


def _matches(answer: str, pattern: str) -> bool:
    return re.search(pattern, answer) is not None


def _is_json(answer: str, schema: Any) -> bool:
    """The whole answer, or what a code fence around it holds."""
    fenced = FENCED.match(answer)
    try:
        value = json.loads(fenced[1] if fenced else answer)
    except ValueError:
        return False
    return _fits(value, schema)


def _are_calls(answer: str, schemas: Mapping[str, Any]) -> bool:
    """At least one call, and all of them of known tools with arguments that fit."""
    try:
        found = list(_calls(answer))
    except (ValueError, TypeError, AttributeError, KeyError):
        return False
    return bool(found) and all(
        name in schemas and isinstance(given, dict) and _fits(given, schemas[name])
        for name, given in found
    )


def _calls(answer: str) -> Iterator[tuple[str, Any]]:
    """Names and arguments, in the forms that chat templates use.

    `<tool_call>{...}</tool_call>`, or JSON from the first bracket on: one call, or a list of them.
    """
    texts = CALLED.findall(answer)
    if not texts:
        start = min((at for at in map(answer.find, "{[") if at >= 0), default=len(answer))
        texts = [answer[start:]]
    for text in texts:
        value, _ = json.JSONDecoder().raw_decode(text.strip())
        for call in value if isinstance(value, list) else [value]:
            inner = call.get("function", call)
            inner = inner if isinstance(inner, dict) else call
            given = inner.get("arguments", inner.get("parameters", {}))
            yield str(inner["name"]), json.loads(given) if isinstance(given, str) else given


RULES: dict[str, Callable[[str, Any], bool]] = {
    EXACT: _is_exact,
    REGEX: _matches,
    JSON: _is_json,
    TOOL_CALLS: _are_calls,
}
