"""Reads rows of tables: CSV, tab-separated values and Parquet."""

import csv
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.calibration.reading.record import MAX_ROW_BYTES, Reading, Record
from quantkit.errors import DataError

BATCH_ROWS = 256
"""Rows of Parquet held as Python objects at once; a row may be megabytes."""
SPOOL_BYTES = 64 << 20


class _Decoded:
    """Decoded lines for the csv module, which remember the first fault since the last row."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)
        self.fault = ""

    def __iter__(self) -> "_Decoded":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            self.fault = self.fault or (
                f"byte {error.start + 1} is not UTF-8 ({line[error.start]:#04x})"
            )
            return line.decode(errors="replace")
        if "\0" in text:
            self.fault = self.fault or f"byte {line.index(0) + 1} is NUL, which text cannot contain"
        return text


def separated(lines: Iterable[bytes], reading: Reading, delimiter: str) -> Iterator[Record]:
    """Rows below a header that names the columns."""
    csv.field_size_limit(MAX_ROW_BYTES)
    decoded = _Decoded(lines)
    rows = csv.reader(decoded, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    begins = 1
    while True:
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error as error:
            if "end of data" in str(error):
                reason = "a quote opens here and is never closed"
            else:
                reason = f"a broken quotation ({error})"
            if header is None:
                raise DataError(f"{reading.path}, line {begins}: {reason}") from error
            reading.bad(begins, decoded.fault or reason)
            row = []
        number, begins = begins, rows.line_num + 1
        fault, decoded.fault = decoded.fault, ""
        if header is None:
            if fault:
                raise DataError(f"{reading.path}, line {number}: {fault}")
            if any(name.strip() for name in row):
                header = _header(row, reading, number)
        elif fault and row:
            reading.bad(number, fault)
        elif len(row) > len(header):
            reading.bad(number, f"{len(row)} fields below a header of {len(header)}")
        elif row:
            row += [""] * (len(header) - len(row))
            value = {name: field for name, field in zip(header, row, strict=True) if name}
            yield Record(f"{reading.name}:{number}", value)


def _header(row: list[str], reading: Reading, number: int) -> list[str]:
    names = [name.strip() for name in row]
    twice = {name for name in names if name and names.count(name) > 1}
    if twice:
        raise DataError(
            f"{reading.path}, line {number}: the header names {sorted(twice)[0]!r} twice; "
            "the first line must name each column"
        )
    return names


def parquet(file: Path | BinaryIO, reading: Reading) -> Iterator[Record]:
    """Rows of a Parquet file, a few at a time."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        # Without `pre_buffer` pages are read as needed, not a row group at once.
        with ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
            for batch in table.iter_batches(BATCH_ROWS):
                for value in _values(batch, number, reading):
                    number += 1
                    if value is not None:
                        yield Record(f"{reading.name}:{number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        first = str(error).strip().splitlines()[0]
        where = f"after row {number} " if number else ""
        raise DataError(
            f"{reading.path} is truncated, damaged or not a Parquet file {where}({first}); copy it "
            "again"
        ) from error


def _values(batch: Any, before: int, reading: Reading) -> Iterator[dict[str, Any] | None]:
    """The rows of a batch as dicts; None for one that cannot be read."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for index in range(batch.num_rows):
        try:
            (value,) = batch.slice(index, 1).to_pylist()
        except UnicodeDecodeError as error:
            raw = error.object[error.start]
            reason = f"byte {error.start + 1} of a field is not UTF-8 ({raw:#04x})"
            reading.bad(before + index + 1, reason, unit="row")
            value = None
        yield value


@contextmanager
def spooled(stream: BinaryIO) -> Iterator[BinaryIO]:
    """A compressed Parquet file, whose end must be read first; on disk if it is large."""
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
        shutil.copyfileobj(stream, spool, 1 << 20)
        spool.seek(0)
        yield spool  # type: ignore[misc]
