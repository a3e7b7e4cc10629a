"""A file whose parts arrive in any order, hashed and flushed to disk while it grows.

The layout is fixed before the first part exists: the header is written first, the space for the
whole file is allocated, and every part is written to its place from any thread. A background thread
follows the part that is complete from the start, so closing the file has little left to do. Gaps
between parts read as zeros.
"""

import errno
import hashlib
import os
import threading
from collections.abc import Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLLOW_BYTES = 8 << 20
FLUSH_BYTES = 256 << 20


class FileWriter:
    """A file being written; it appears under `path` at once, so pass a scratch name."""

    def __init__(
        self,
        path: Path,
        head: bytes,
        places: Mapping[str, tuple[int, int]],
        size: int,
        present: Container[str] = (),
    ) -> None:
        """`places` are starts and ends in file order, counted from the end of the header.

        `present` names parts that an earlier writer of the same file has already written.
        """
        self.path = path
        self.places = {n: (len(head) + a, len(head) + b) for n, (a, b) in places.items()}
        self._left = {n: 0 if n in present else b - a for n, (a, b) in places.items()}
        self._size = len(head) + size
        self._changed = threading.Condition()
        self._abandoned = False
        self._failure: Exception | None = None
        self._digest = hashlib.sha256()
        self._is_stale = False
        self._follower = threading.Thread(target=self._follow, daemon=True)
        resumed = any(name in present for name in places)
        self._file = os.open(path, os.O_RDWR | (0 if resumed else os.O_CREAT | os.O_EXCL), 0o644)
        try:
            _claim(self._file, self._size)
            self._put(head, 0)
        except BaseException:
            os.close(self._file)
            raise
        self._follower.start()

    def write(self, name: str, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        """Write bytes of a part, starting at its byte `offset`."""
        start, end = self.places[name]
        assert start + offset + len(data) <= end, f"{name} gets more bytes than it has"
        self._put(data, start + offset)
        with self._changed:
            self._left[name] -= len(data)
            self._changed.notify()

    def replace(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Overwrite a complete part; the file is hashed again."""
        start, end = self.places[name]
        assert not self._left[name], f"{name} is not complete"
        assert len(data) == end - start, f"{name} has {end - start} bytes, not {len(data)}"
        self._put(data, start)
        self._is_stale = True

    def flush(self) -> None:
        """Flush what was written to disk."""
        _flush(self._file)

    def close(self) -> str:
        """Flush to disk after checking that every part is complete; returns the sha256."""
        missing = [name for name, left in self._left.items() if left]
        if missing:
            self.abandon()
            raise AssertionError(f"{self.path}: not written in full: {missing[:5]}")
        self._follower.join()
        try:
            if self._failure is not None:
                raise self._failure
            os.fsync(self._file)
            if self._is_stale:
                self._digest = self._hashed()
        finally:
            os.close(self._file)
        return self._digest.hexdigest()

    def _hashed(self) -> Any:
        digest, done = hashlib.sha256(), 0
        while done < self._size:
            part = os.pread(self._file, FOLLOW_BYTES, done)
            digest.update(part)
            done += len(part)
        return digest

    def abandon(self) -> None:
        """Close without checks, after a failure."""
        with self._changed:
            self._abandoned = True
            self._changed.notify()
        self._follower.join()
        os.close(self._file)

    def _follow(self) -> None:
        try:
            # Waiting for the disk and hashing take about as long, so they run in parallel.
            with ThreadPoolExecutor(1) as flusher:
                self._hash_as_it_grows(flusher)
        except Exception as error:  # whatever it is, the hash covers only a part
            self._failure = error

    def _hash_as_it_grows(self, flusher: ThreadPoolExecutor) -> None:
        done, flushed = 0, 0
        flush: Future[None] | None = None
        names = iter(self.places)
        name = next(names, None)
        while done < self._size:
            with self._changed:
                while name is not None and not self._left[name]:
                    name = next(names, None)
                complete = self._size if name is None else self.places[name][0]
                if self._abandoned:
                    return
                if complete - done < FOLLOW_BYTES and complete < self._size:
                    self._changed.wait()
                    continue
            part = os.pread(self._file, min(FOLLOW_BYTES, complete - done), done)
            if not part:
                raise OSError(errno.EIO, f"{self.path} ended while it was written")
            self._digest.update(part)
            done += len(part)
            if done - flushed >= FLUSH_BYTES and (flush is None or flush.done()):
                if flush is not None:
                    flush.result()
                flush, flushed = flusher.submit(_flush, self._file), done
        if flush is not None:
            flush.result()

    def _put(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._file, view[done:], offset + done)


def _claim(file: int, size: int) -> None:
    """Allocate the space, so that a full disk is reported before the work.

    macOS can only set the size.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _flush(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)
