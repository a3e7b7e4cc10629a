"""One writer at a time for every output.

A lock is an empty file beside or inside the output, held with flock: the kernel lets go of it when
the process ends, however it ends. Whoever holds it removes it on the way out, so an acquirer checks
that the file it locked is still the one with that name.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.errors import StorageError

INSIDE = ".quantkit.lock"
"""In a folder that a command fills file by file."""

_holders: dict[Path, int] = {}
"""Locks of this process and the threads that hold them: a command locks its output folder once more
where it calls another stage on it."""


@contextmanager
def sole_writer(path: Path, output: Path) -> Iterator[None]:
    """Hold the lock file `path` while `output` is written; the second to ask is refused."""
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
        place.unlink(missing_ok=True)  # while it is still ours
        os.close(descriptor)


def _acquired(place: Path, output: Path) -> int:
    while True:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held, named = os.fstat(descriptor), place.stat()
        except BlockingIOError:
            os.close(descriptor)
            raise StorageError(
                f"another run is writing {output}; wait for it to finish, or choose another --out"
            ) from None
        except FileNotFoundError:  # removed by its holder between our open and our lock
            os.close(descriptor)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
            return descriptor
        os.close(descriptor)
