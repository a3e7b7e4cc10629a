"""A cache of a model's answers, so that none is computed twice.

The key is the request, token by token: changed data makes another request, and is never answered
from here. One file per model and way of computing.
"""

import hashlib
import os
import sqlite3
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

from quantkit.errors import StorageError
from quantkit.home import expanded
from quantkit.scoring.answering import Answer, Request

SECONDS_BETWEEN_COMMITS = 2.0
OF_A_SOURCE = frozenset({".answers", ".head", ".reference"})
"""Endings of a source's files that its candidates are compared with: see `model`."""


def default_folder() -> Path:
    """This user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(base) / "quantkit" / "scores"


def identity(facts: Mapping[str, str]) -> str:
    """A name for everything that determines a model's answers."""
    text = "\n".join(f"{key}={facts[key]}" for key in sorted(facts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def keys_of(requests: Sequence[Request]) -> list[bytes]:
    """Hashes of requests, 16 bytes each."""
    keys = []
    context: tuple[int, ...] | None = None
    begun = hashlib.sha256()
    for request in requests:
        if request.context is not context:  # all answers to a question share one context object
            context = request.context
            begun = hashlib.sha256(array("q", context).tobytes())
            begun.update(len(context).to_bytes(8, "little"))
        digest = begun.copy()
        digest.update(array("q", request.continuation).tobytes())
        keys.append(digest.digest()[:16])
    return keys


class AnswerCache:
    """Answers by request, in a small database."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A server's answers arrive from several threads; Python's sqlite is built for that.
            self._base = sqlite3.connect(path, timeout=60, check_same_thread=False)
            self._base.execute("pragma journal_mode=wal")
            self._base.execute(
                "create table if not exists answers "
                "(key blob primary key, log_probability real, greedy integer) without rowid"
            )
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"cannot use the cache {path}: {error}; remove it, or give another --cache"
            ) from error
        self._committed = time.monotonic()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Answer | None:
        """The cached answer, if any."""
        command = "select log_probability, greedy from answers where key = ?"
        found = self.execute(command, (key,)).fetchone()
        return None if found is None else Answer(found[0], bool(found[1]))

    def put(self, key: bytes, answer: Answer) -> None:
        """Store an answer; it is on disk within seconds."""
        values = (key, answer.log_probability, int(answer.greedy))
        self.execute("insert or replace into answers values (?, ?, ?)", values)

    def execute(self, command: str, values: tuple[object, ...] = ()) -> sqlite3.Cursor:
        """One SQL command; what it changes is on disk within seconds."""
        with self._lock:
            found = self._base.execute(command, values)
            waited = time.monotonic() - self._committed > SECONDS_BETWEEN_COMMITS
            if waited and not command.startswith("select"):
                self._base.commit()
                self._committed = time.monotonic()
        return found

    def close(self) -> None:
        """Write everything to disk."""
        self._base.commit()
        self._base.close()


class TextCache:
    """Texts by key, in the database of a model's answers."""

    def __init__(self, answers: AnswerCache) -> None:
        self._answers = answers
        answers.execute("create table if not exists texts (key blob primary key, text text)")

    def get(self, key: bytes) -> str | None:
        """The cached text, if any."""
        found = self._answers.execute("select text from texts where key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def put(self, key: bytes, text: str) -> None:
        """Store a text; it is on disk within seconds."""
        self._answers.execute("insert or replace into texts values (?, ?)", (key, text))


class ByName(MutableMapping[str, tuple[float, bool]]):
    """The same as a mapping, for callers with their own keys."""

    def __init__(self, cache: AnswerCache) -> None:
        self._cache = cache
        self._new: dict[str, tuple[float, bool]] = {}

    def __getitem__(self, name: str) -> tuple[float, bool]:
        if name in self._new:
            return self._new[name]
        found = self._cache.get(name.encode())
        if found is None:
            raise KeyError(name)
        return found.log_probability, found.greedy

    def __setitem__(self, name: str, answer: tuple[float, bool]) -> None:
        self._new[name] = answer
        self._cache.put(name.encode(), Answer(*answer))

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError("answers are kept")

    def __iter__(self) -> Iterator[str]:
        return iter(self._new)

    def __len__(self) -> int:
        return len(self._new)


class Cached:
    """How many answers came from a cache, by task."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def count(self, task: str, n_asked: int, n_kept: int) -> None:
        """Count some answers of a task, and how many of them were cached."""
        self._asked[task] += n_asked
        self._kept[task] += n_kept

    def shares(self, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """By task and by group of tasks, only those with any."""
        inside = {task: [task] for task in self._asked} | {k: list(v) for k, v in groups.items()}
        found = {}
        for name, tasks in inside.items():
            if kept := sum(self._kept[task] for task in tasks):
                found[name] = kept / sum(self._asked[task] for task in tasks)
        return found
