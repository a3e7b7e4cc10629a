"""Bounded parsing of JSON and YAML from outside; faults are ValueErrors that name the problem.

Python's own readers accept more than a file should hold: NaN and infinity, numbers of thousands of
digits, lone surrogates that cannot be written back, nesting that exhausts the stack of whoever
walks the result, and YAML aliases that expand a few lines beyond the size of memory.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 100
"""Most levels of nested lists and objects."""
MAX_DIGITS = 40
"""Most digits of an integer: tokenizers write 10^30 for "no limit"."""
MAX_YAML_BYTES = 1 << 20
MAX_YAML_NODES = 100_000
"""Most nodes with every alias expanded."""


def parse_json(raw: bytes | str, finite: bool = True) -> Any:
    """Parse a UTF-8 JSON document. Without `finite` it may hold NaN and infinity, as configs do."""
    text = raw if isinstance(raw, str) else as_text(raw)
    if not text.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(
            text,
            parse_int=_whole,
            parse_float=_finite if finite else None,
            parse_constant=_refused if finite else None,
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        check_depth(value)
    if "\\u" in text:
        for part in _strings(value):
            _check_text(part)
    return value


def as_text(raw: bytes) -> str:
    """Decode UTF-8; the error gives the position of the first byte that is not UTF-8."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "; it looks like UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise ValueError(f"it is not UTF-8 (byte {error.start + 1}){hint}") from None
    return text.removeprefix("\ufeff")


def parse_yaml(raw: bytes | str, loader: Any) -> Any:
    """Parse a UTF-8 YAML document with a loader that builds plain data only."""
    import yaml

    if len(raw) > MAX_YAML_BYTES:
        raise ValueError(f"it is longer than {MAX_YAML_BYTES >> 20} MiB")
    text = raw if isinstance(raw, str) else as_text(raw)
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _check_nodes(node, yaml)
            return _constructed(reader, node)
        finally:
            reader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None)
        why = f": {reason}" if isinstance(reason, str) and reason.isprintable() else ""
        raise ValueError(f"it is not valid YAML{where}{why}") from error
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None


def _constructed(reader: Any, node: Any) -> Any:
    """Plain data. PyYAML's constructors raise arbitrary errors, for example on odd dates."""
    try:
        return reader.construct_document(node)
    except (ValueError, TypeError, AttributeError, OverflowError, LookupError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"it is not valid YAML: {reason}") from error


def _check_nodes(top: Any, yaml: Any) -> None:
    """Refuse recursive or multiplying aliases; limits on depth and text are those of JSON."""
    sizes: dict[int, int] = {}
    above: set[int] = set()

    def size(node: Any, depth: int) -> int:
        known = sizes.get(id(node))
        if known is not None:
            return known
        line = f"line {node.start_mark.line + 1}"
        if id(node) in above:
            raise ValueError(f"it refers to itself: an alias is inside the node it names ({line})")
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels ({line})")
        total = 1
        if isinstance(node, yaml.ScalarNode):
            _check_text(node.value, f" ({line})")
        else:
            above.add(id(node))
            pairs = isinstance(node, yaml.MappingNode)
            parts = [part for pair in node.value for part in pair] if pairs else node.value
            total += sum(size(part, depth + 1) for part in parts)
            above.discard(id(node))
        if total > MAX_YAML_NODES:
            raise ValueError(f"it has aliases for more than {MAX_YAML_NODES:,} values ({line})")
        sizes[id(node)] = total
        return total

    size(top, 0)


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:MAX_DIGITS]} is out of range")
    return value


def _refused(text: str) -> Any:
    raise ValueError(f"{text} is not a number that JSON knows")


def check_depth(value: Any) -> None:
    """Refuse data nested deeper than a file should be."""
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        level = [part for whole in level for part in _parts(whole)]
        depth += 1


def _parts(value: Any) -> list[Any]:
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in held if isinstance(part, dict | list)]


def _strings(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            yield from part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _check_text(text: str, where: str = "") -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it holds half a character (\\u{ord(text[error.start]):x}){where}"
        ) from None
