"""Reads rows from files: JSON, tables and plain text, compressed or not, one row at a time.

Memory stays small whatever the size of a file; only a `.json` that is one document is read whole,
and refused above a gigabyte.
"""

import glob
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from quantkit.calibration.reading.json_rows import json_document, json_lines
from quantkit.calibration.reading.plain_text import TEXT_CHARACTERS, documents
from quantkit.calibration.reading.record import (
    MAX_ROW_BYTES,
    OnBad,
    Reading,
    Record,
    Trouble,
    pass_over,
)
from quantkit.calibration.reading.streams import PACKINGS, as_utf8, explained, packing_of, unpacked
from quantkit.calibration.reading.tables import parquet, separated, spooled
from quantkit.errors import DataError
from quantkit.home import expanded
from quantkit.nearby import similar

__all__ = ["TEXT_CHARACTERS", "Record", "Trouble", "find", "read", "read_stream"]

Format = Callable[[Iterable[bytes], Reading], Iterator[Record]]
PARQUET = ".parquet"


def _json_or_text(lines: Iterable[bytes], reading: Reading) -> Iterator[Record]:
    """Decided by the first line that is not blank."""
    lines = iter(lines)
    read = []
    for line in lines:
        read.append(line)
        if line.strip():
            break
    form = json_document if _is_json(read[-1] if read else b"") else documents
    return form(chain(read, lines), reading)


FORMATS: dict[str, Format] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_document,
    ".csv": partial(separated, delimiter=","),
    ".tsv": partial(separated, delimiter="\t"),
    ".txt": documents,
    ".md": documents,
    ".raw": documents,
    ".text": documents,
    ".log": _json_or_text,
}
KNOWN = f"{', '.join((*FORMATS, PARQUET))}, each also compressed ({' or '.join(PACKINGS)})"
# Files that accompany data and describe it.
ABOUT = ("readme", "license", "dataset_info", "dataset_infos")


def find(path: Path | str) -> list[Path]:
    """The files a path refers to: itself, those in a folder, or those matching a pattern."""
    path = expanded(path)
    if path.is_dir():
        found = _of_folder(path)
    elif path.exists():
        _ending(path)
        return [path]
    else:
        matched = _matching(path)
        if not matched:
            hint = similar(path, files=True)
            raise DataError(f"no file or folder matches {path}{hint}")
        found = []
        for match in matched:
            found += _of_folder(match) if match.is_dir() else [match]
        # `**` finds a folder as well as its contents.
        known = sorted({file for file in found if _is_known(file)})
        found = [file for file in known if not _is_about(file)] or known
    if not found:
        raise DataError(f"nothing in {path} has a known extension; known: {KNOWN}")
    return found


def read(
    path: Path, skip_bad: bool = False, on_bad: OnBad = pass_over, name: str | None = None
) -> Iterator[Record]:
    """The rows of one file; their places begin with `name`, by default the file's own name."""
    reading = Reading(str(path), name or path.name, skip_bad, on_bad)
    with explained(reading.path):
        ending, packing = _ending(path)
        if ending == PARQUET and not packing:
            yield from _some(parquet(path, reading), reading)
            return
        with path.open("rb") as raw:
            stream = unpacked(raw, packing)
            if ending == PARQUET:
                with spooled(stream) as file:
                    yield from _some(parquet(file, reading), reading)
            else:
                yield from _some(
                    FORMATS[ending](_lines(as_utf8(stream), reading), reading), reading
                )


def read_stream(
    stream: BinaryIO, name: str, skip_bad: bool = False, on_bad: OnBad = pass_over
) -> Iterator[Record]:
    """The rows of standard input: JSON or plain text, detected by content, compressed or not."""
    reading = Reading(name, name, skip_bad, on_bad)
    with explained(name):
        plain = unpacked(stream, "")
        if packing := packing_of(plain):
            plain = unpacked(plain, packing)
        yield from _some(_json_or_text(_lines(as_utf8(plain), reading), reading), reading)


def _lines(stream: BinaryIO, reading: Reading) -> Iterator[bytes]:
    """Lines no longer than a row can be; a longer one is bad, and never in memory as a whole.

    A small compressed file may hold a line of any length.
    """
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_ROW_BYTES)
            reading.bad(number, f"it is longer than {MAX_ROW_BYTES >> 20} MiB, too long for a row")
            line = b"\n"  # so that later lines keep their numbers
        yield line


def _is_json(line: bytes) -> bool:
    line = b"".join(line[:1000].split())
    # A bracket alone may be text.
    return line.startswith((b"{", b"[{", b'["', b"[[")) or line == b"["


def _some(records: Iterator[Record], reading: Reading) -> Iterator[Record]:
    """The records; an error if there are none and no reason was reported."""
    first = next(records, None)
    if first is not None:
        yield first
        yield from records
    elif not reading.n_bad:
        reading.bad_file("is empty")


def _matching(pattern: Path) -> list[Path]:
    # Path.glob does not accept absolute patterns and finds hidden files.
    return [Path(name) for name in sorted(glob.glob(str(pattern), recursive=True))]  # noqa: PTH207


def _of_folder(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and _is_known(path)
        and not _is_about(path)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _is_about(path: Path) -> bool:
    return path.name.split(".")[0].lower() in ABOUT


def _is_known(path: Path) -> bool:
    try:
        _ending(path)
    except DataError:
        return False
    return path.is_file()


def _ending(path: Path) -> tuple[str, str]:
    """The file's format, and its compression."""
    name, packing = path.name.lower(), ""
    if name.endswith(PACKINGS):
        name, _, last = name.rpartition(".")
        packing = f".{last}"
    ending = Path(name).suffix
    if ending in FORMATS or ending == PARQUET:
        return ending, packing
    raise DataError(f"{path} has an unknown extension; known: {KNOWN}")


def is_data(name: str) -> bool:
    """Whether a name refers to data: an existing folder, a pattern, or a known extension."""
    try:
        _ending(Path(name))
    except DataError:
        return "*" in name or expanded(name).is_dir()
    return True
