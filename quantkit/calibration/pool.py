"""Read all sources once, in bounded memory: the usable rows, and what happened to the others.

Every row is recognised and compared with earlier rows and with the evaluation text. Of the rows
that remain, each source keeps a uniform sample large enough to select from.
"""

import hashlib
import heapq
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from quantkit.calibration.overlap.contamination import EvaluationText
from quantkit.calibration.overlap.duplicates import DuplicateFinder, prefix_of
from quantkit.calibration.reading import files, hub, python_text, recognise
from quantkit.calibration.reading.files import Record, Trouble
from quantkit.calibration.reading.record import SKIP
from quantkit.calibration.reading.row import Row
from quantkit.calibration.spec import Files, Hub, Python, SetSpec, Stdin, source_name
from quantkit.errors import DataError
from quantkit.home import expanded
from quantkit.progress import Progress
from quantkit.storage import sha256_of

BATCH_ROWS = 4096
BATCH_CHARACTERS = 16 << 20
MIN_ROWS = 4096
"""Rows of a source that are kept in any case, if it has as many."""
MAX_CHARACTERS = 256 << 20
"""Limit on their total length, which takes precedence."""


@dataclass
class Account:
    """What happened to every row of one source."""

    counts: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    """Remarks on rows that were kept."""
    examples: dict[str, str] = field(default_factory=dict)
    """An example sentence for each reason for leaving out a row."""

    def leave_out(self, reason: str, example: str = "") -> None:
        self.counts[reason] += 1
        if example:
            self.examples.setdefault(reason, example)


@dataclass
class GatheredSource:
    """The rows of one source that samples are selected from."""

    name: str
    weight: float | None
    rows: list[Row]
    account: Account
    digest: str
    """Digest of its files, or of its rows if there are none."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 by file name."""


class Reservoir:
    """A uniform sample of rows, bounded in characters."""

    def __init__(self, characters: int, rng: random.Random) -> None:
        self._limit = min(characters, MAX_CHARACTERS)
        self._rng = rng
        self._heap: list[tuple[float, int, Row, int]] = []
        self._characters = 0
        self.n_evicted = 0

    def add(self, number: int, row: Row, characters: int) -> None:
        """Offer a row; an earlier one may have to go."""
        # The largest random keys go first: whatever stays is a uniform sample of all rows offered.
        heapq.heappush(self._heap, (-self._rng.random(), number, row, characters))
        self._characters += characters
        while self._characters > self._limit and (
            len(self._heap) > MIN_ROWS or self._characters > MAX_CHARACTERS
        ):
            if len(self._heap) == 1:
                return
            *_, freed = heapq.heappop(self._heap)
            self._characters -= freed
            self.n_evicted += 1

    def rows(self) -> list[Row]:
        """The remaining rows, in their original order."""
        return [row for _, _, row, _ in sorted(self._heap, key=lambda item: item[1])]


@dataclass(frozen=True)
class Reading:
    """Where sources are read from, and how unreadable rows are handled."""

    base: Path = Path()
    """Base folder for the paths in a set's file."""
    skip_bad: bool = False
    """Skip what cannot be read, instead of stopping."""
    data: Path | None = None
    """A local tree of dataset folders, used in place of the hub."""


def gather(
    spec: SetSpec,
    reading: Reading,
    characters: int,
    check: Callable[[Row], None],
    evaluation: EvaluationText | None,
    progress: Progress,
) -> list[GatheredSource]:
    """Read all sources; `characters` is how much of each is enough to select from."""
    finder = (
        None if spec.near_duplicates is None else DuplicateFinder(spec.near_duplicates, spec.seed)
    )
    gathered = []
    for index, source in enumerate(spec.sources):
        name = source_name(source)
        account = Account()
        reservoir = Reservoir(characters, random.Random(f"{spec.seed} {index}"))
        digest = hashlib.sha256()
        number = 0
        progress.start(f"read {name}", _size(source, reading.base), _unit(source))
        rows = _rows(source, name, reading, account, progress, bool(spec.redact))
        for batch, texts in _batches(rows):
            for text in texts:
                digest.update(text.encode("utf-8", "surrogatepass"))
            for row in batch[:1]:
                check(row)
            keep = _distinct(batch, texts, finder, account)
            if evaluation is not None:
                keep = _clean(keep, texts, batch, evaluation, account)
            for place in keep:
                reservoir.add(number + place, batch[place], _size_of(batch[place], texts[place]))
            number += len(batch)
        progress.finish()
        account.counts["not drawn"] += reservoir.n_evicted
        hashes = _hashes(source, reading.base)
        total = hashlib.sha256("".join(hashes.values()).encode()) if hashes else digest
        gathered.append(
            GatheredSource(
                name, source.weight, reservoir.rows(), account, total.hexdigest(), hashes
            )
        )
    return gathered


def _size_of(row: Row, text: str) -> int:
    """Characters needed to keep a row, including its tools, calls and images."""
    calls = [m["tool_calls"] for m in row.messages if m.get("tool_calls")]
    images = sum(len(one) for m in row.messages for one in m.get("images", ()))
    beside = len(str(row.tools)) + len(str(calls)) if row.tools or calls else 0
    return len(text) + images + beside


def _distinct(
    batch: list[Row], texts: list[str], finder: DuplicateFinder | None, account: Account
) -> list[int]:
    """Indices of rows that are not near-duplicates of earlier ones."""
    if finder is None:
        return list(range(len(batch)))
    first = finder.add(texts, [prefix_of(row) for row in batch])
    keep = []
    for place, earlier in enumerate(first.tolist()):
        if earlier < 0:
            keep.append(place)
        else:
            account.leave_out("near-duplicate", f"{batch[place].place} repeats an earlier row")
    return keep


def _clean(
    keep: list[int],
    texts: list[str],
    batch: list[Row],
    evaluation: EvaluationText,
    account: Account,
) -> list[int]:
    """Those of these indices that do not overlap with the evaluation text."""
    found = evaluation.overlaps([texts[place] for place in keep]).tolist()
    for place, overlaps in zip(keep, found, strict=True):
        if overlaps:
            account.leave_out(
                "contaminated", f"{batch[place].place} shares 13 words with the evaluation data"
            )
    return [place for place, overlaps in zip(keep, found, strict=True) if not overlaps]


def _batches(rows: Iterator[Row]) -> Iterator[tuple[list[Row], list[str]]]:
    """Rows and their text, a few thousand at a time."""
    batch: list[Row] = []
    texts: list[str] = []
    characters = 0
    for row in rows:
        batch.append(row)
        texts.append(row.plain)
        characters += len(texts[-1])
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch, texts
            batch, texts, characters = [], [], 0
    if batch:
        yield batch, texts


def _rows(
    source: Any,
    name: str,
    reading: Reading,
    account: Account,
    progress: Progress,
    private: bool,
) -> Iterator[Row]:
    """Recognised rows; unusable ones are counted, or raise an error."""
    base, skip_bad, data = reading.base, reading.skip_bad, reading.data

    def bad(trouble: Trouble) -> None:
        account.counts["read"] += 1
        account.leave_out("unreadable", f"{trouble.place}: {trouble.reason}")

    if isinstance(source, Python):
        for row in islice(_python(source, name), source.max_rows):
            account.counts["read"] += 1
            yield row
        return
    known = recognise.Recogniser(name, source.columns, source.rows, _declared(source))
    for record in islice(_records(source, base, skip_bad, bad, progress, data), source.max_rows):
        account.counts["read"] += 1
        try:
            yield known(record)
        except recognise.Empty as error:
            account.leave_out("empty", str(error))
        except recognise.Unrecognised as error:
            if not skip_bad and not private:
                raise
            if not skip_bad:  # may hold private data, so it is not shown
                raise DataError(
                    f"{record.place} is not recognised, and is not shown since rows are redacted; "
                    "name its fields in the set's file, such as `columns: {text: FIELD}` beside "
                    f"the source, or {SKIP}"
                ) from None
            account.leave_out("unrecognised", record.place if private else str(error))


def _declared(source: Files | Hub | Stdin) -> str:
    """A source as its set's file names it, on one line."""
    given = source.model_dump(mode="json", exclude_defaults=True, exclude={"columns", "rows"})
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in given.items())


def _records(
    source: Files | Hub | Stdin,
    base: Path,
    skip_bad: bool,
    bad: Callable[[Trouble], None],
    progress: Progress,
    data: Path | None,
) -> Iterator[Record]:
    if isinstance(source, Hub):
        yield from hub.stream(source.dataset, source.config, source.split, source.revision, data)
    elif isinstance(source, Stdin):
        yield from files.read_stream(sys.stdin.buffer, "stdin", skip_bad, bad)
    else:
        for name, path in _files(source, base).items():
            yield from files.read(path, skip_bad, bad, name)
            progress.advance(path.stat().st_size)


def _python(source: Python, name: str) -> Iterator[Row]:
    docs = source.kind == "python-docs"
    for document in python_text.train() if docs else python_text.sources("train"):
        yield Row(name, document.name, "text", text=document.text)


def _size(source: Any, base: Path) -> int:
    if isinstance(source, Files):
        return sum(path.stat().st_size for path in _files(source, base).values())
    return source.max_rows or 0


def _unit(source: Any) -> str:
    return "bytes" if isinstance(source, Files) else "rows"


def _hashes(source: Any, base: Path) -> dict[str, str]:
    if not isinstance(source, Files):
        return {}
    return {name: sha256_of(path) for name, path in _files(source, base).items()}


def _files(source: Files, base: Path) -> dict[str, Path]:
    """A source's files by unique names, used in rows and manifests."""
    root = base / expanded(source.path)
    found = files.find(root)
    top = root if root.is_dir() else Path(os.path.commonpath([path.parent for path in found]))
    return {str(path.relative_to(top)): path for path in found}


def require_rows(gathered: list[GatheredSource]) -> None:
    """Every source must contribute something."""
    for source in gathered:
        if not source.rows:
            raise DataError(f"{source.name} has no usable row: {describe(source.account)}")


def describe(account: Account) -> str:
    """What happened to the rows of a source, in one line."""
    counts = dict(account.counts)
    total = counts.pop("read", 0)
    taken = ", ".join(f"{n:,} {reason}" for reason, n in counts.items() if n)
    return f"{total:,} rows read" + (f", {taken}" if taken else "")
