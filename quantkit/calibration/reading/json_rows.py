"""Reads rows of JSON: one per line, or a list of them as one document."""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from quantkit.calibration.reading.record import MAX_DOCUMENT_BYTES, Reading, Record
from quantkit.errors import DataError
from quantkit.parsing import check_depth

# fmt: off
LISTS = frozenset({
    "data", "rows", "examples", "samples", "items", "records", "instances", "entries",
    "documents", "texts", "results", "conversations", "train", "validation", "test",
})
"""Fields in which a document keeps its rows."""
OF_A_ROW = frozenset({
    "messages", "conversation", "tools", "functions", "choices", "prompt", "chosen", "rejected",
})
"""Fields of a single row that are lists themselves."""
# fmt: on
ROWS = (dict, str, list)


def json_lines(lines: Iterable[bytes], reading: Reading) -> Iterator[Record]:
    """One row per line; blank lines count but are skipped."""
    loads, name = orjson.loads, reading.name
    for number, line in enumerate(lines, 1):
        try:
            value = loads(line)
        except orjson.JSONDecodeError:
            if not line.strip():
                continue
            try:
                value = _leniently(line)
            except ValueError as error:
                cut = "" if line.endswith(b"\n") else ", where the file ends"
                reading.bad(number, f"{error}{cut}")
                continue
        if isinstance(value, ROWS):
            yield Record(f"{name}:{number}", value)
        else:
            reading.bad(number, _no_row(value))


def json_document(lines: Iterable[bytes], reading: Reading) -> Iterator[Record]:
    """A list of rows, an object that holds one, a single row, or JSON Lines after all."""
    lines = iter(lines)
    read, written = [], []
    for line in lines:
        read.append(line)
        if line.strip():
            written.append(line)
        if len(written) == 2:
            if _one_a_line(*written):
                yield from json_lines(itertools.chain(read, lines), reading)
                return
            break
    whole = _joined(itertools.chain(read, lines), reading)
    if not whole.strip():
        return
    try:
        value = orjson.loads(whole)
    except orjson.JSONDecodeError:
        try:
            value = _leniently(whole)
        except ValueError as error:
            raise DataError(f"{reading.path}: {error}; repair it or write it again") from error
    for number, row in enumerate(_rows(value, reading), 1):
        if isinstance(row, ROWS):
            yield Record(f"{reading.name}:{number}", row)
        else:
            reading.bad(number, _no_row(row), unit="row")


def _joined(lines: Iterable[bytes], reading: Reading) -> bytes:
    found = bytearray()
    for line in lines:
        found += line
        if len(found) > MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{reading.path} is a JSON document of more than {MAX_DOCUMENT_BYTES >> 30} GiB; "
                "write it as JSON Lines, one row per line"
            )
    return bytes(found)


def _one_a_line(first: bytes, second: bytes) -> bool:
    """Whether two lines are separate rows: no JSON document continues with a `{` after one."""
    first, second = first.strip(), second.strip()
    if first.startswith(b"{"):
        return second.startswith(b"{")
    return first.startswith(b"[") and first.endswith(b"]") and second.startswith((b"[", b"{"))


def _rows(value: Any, reading: Reading) -> list[Any]:
    if isinstance(value, list):
        # A list of messages is one chat.
        return [value] if _messages(value) else value
    if not isinstance(value, dict):
        return [value]
    named = [key for key, held in value.items() if key in LISTS and _holds_rows(held)]
    if len(named) > 1:
        raise DataError(
            f"{reading.path} holds several lists of rows ({', '.join(named)}); give each its file"
        )
    if named:
        return list(value[named[0]])
    if len(value) == 1:
        ((key, held),) = value.items()
        if key not in OF_A_ROW and _holds_rows(held):
            return list(held)
    return [value]


def _holds_rows(value: Any) -> bool:
    if not isinstance(value, list) or not value or _messages(value):
        return False
    return all(isinstance(row, ROWS) for row in value)


def _messages(rows: list[Any]) -> bool:
    return bool(rows) and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in rows)


def _no_row(value: Any) -> str:
    return f"a row is an object or a text, not {json.dumps(value)[:40]}"


def _leniently(raw: bytes) -> Any:
    """Parse what Python writes and orjson refuses: NaN, and lone surrogates from truncated logs."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        breaks = raw.count(b"\n", 0, error.start)
        byte = error.start - raw.rfind(b"\n", 0, error.start)
        where = f"line {breaks + 1}, byte {byte}" if breaks else f"byte {byte}"
        raise ValueError(f"{where} is not UTF-8 ({raw[error.start]:#04x})") from error
    if "\0" in text:
        raise ValueError(f"byte {raw.index(0) + 1} is NUL, which text cannot contain")
    try:
        value = json.loads(text)
        check_depth(value)  # how deep Python itself reads depends on its version
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"broken JSON at {line}column {error.colno} ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error
    # Lone surrogates have no UTF-8; pairs are joined on the way.
    written = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return json.loads(written.decode("utf-16-le", "replace"))
