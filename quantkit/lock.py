"""One writer at a time for every output.

A lock is an empty file beside or inside the output, held with flock: the kernel releases it when
the process ends, however it ends. The holder removes it on the way out, so whoever acquires a lock
checks that the file it locked still has that name.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import StorageError

INSIDE = ".quantkit.lock"
"""Lock file in a folder that a command fills file by file."""

_holders: dict[Path, int] = {}
"""Locks of this process and the threads that hold them: a command locks its output folder again
when it calls another stage on it.
"""


def abandoned(folder: Path) -> Iterator[Path]:
    """Remove the lock files of killed writers; each is held while it is inspected."""
    for path in sorted(folder.glob(".*.lock")):
        if path.name == INSIDE:
            continue
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_size:
                continue  # not our lock
            descriptor = _held(path)
        except OSError:
            continue  # a writer is active
        try:
            yield path
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _held(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, named = os.fstat(descriptor), path.stat()
        if (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino):
            raise BlockingIOError
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def sole_writer(path: Path, output: Path) -> Iterator[None]:
    """Hold the lock file `path` while `output` is written; a second writer is refused."""
    place = path.parent.resolve() / path.name
    if _holders.get(place) == threading.get_ident():
        yield
        return
    descriptor = _acquired(place, output)
    _holders[place] = threading.get_ident()
    try:
        yield
    finally:
        del _holders[place]
        place.unlink(missing_ok=True)  # while we still hold it
        os.close(descriptor)


def _acquired(place: Path, output: Path) -> int:
    while True:
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            return _held(place)
        except BlockingIOError as error:
            if error.errno is None:  # another file has that name by now
                continue
            raise StorageError(
                f"another run is writing {output}; wait for it to finish, or choose another --out"
            ) from None
        except FileNotFoundError:  # removed by its holder between our open and our lock
            continue
