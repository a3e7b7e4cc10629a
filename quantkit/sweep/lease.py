"""Who may drive a sweep: a lease that expires, so that two drivers never work on one folder.

Leases are numbered files. Whoever creates the next number holds the folder, and the storage lets
only one do that; the holder rewrites its file before it expires. A driver that was away for too
long finds a higher number there, and stops.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quantkit.errors import StorageError
from quantkit.parsing import parse_json
from quantkit.sweep.place import EXCLUSIVE, Place

FOLDER = "lease"
SECONDS = 60.0
"""How long a silent holder keeps a folder; the machines' clocks must agree better than this."""


@dataclass(frozen=True)
class Holder:
    """Who holds a folder, and until when."""

    owner: str
    host: str
    pid: int
    since: float
    expires: float

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this machine that no longer exists."""
        return self.host == _host() and not _is_running(self.pid)

    def description(self) -> str:
        """The holder in words."""
        when = time.strftime("%H:%M:%S", time.localtime(self.expires))
        return f"process {self.pid} on {self.host.partition(' ')[0]}, whose lease ends at {when}"


class Lease:
    """The right to write below a place, held while the context is open."""

    def __init__(
        self,
        place: Place,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._place, self._seconds, self._clock = place, seconds, clock
        now = clock()
        self._mine = Holder(uuid.uuid4().hex, _host(), os.getpid(), now, now + seconds)
        self._number = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost = ""
        """Why the lease was lost; empty while it is held."""

    def __enter__(self) -> "Lease":
        self.take()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="lease")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self._seconds)
        if not self.lost:
            self._place.write(_name(self._number), _content(replace(self._mine, expires=0.0)))

    def take(self) -> None:
        """Become the holder, or report who is."""
        if self._place.protocol not in EXCLUSIVE:
            raise StorageError(
                f"{self._place.address}: {self._place.protocol}:// cannot keep two drivers apart; "
                "use a folder, s3:// or gs://"
            )
        number, holder = current(self._place)
        if holder is not None and holder.expires > self._clock() and not holder.is_gone:
            raise StorageError(
                f"{self._place.address} belongs to another driver: {holder.description()}; wait "
                "for it to end, or choose another --out"
            )
        self._number = number + 1
        if not self._place.create(_name(self._number), _content(self._mine)):
            raise StorageError(
                f"{self._place.address} was taken by another driver a moment ago; try again later"
            )
        if self._place.create(_name(self._number), _content(self._mine)):
            raise StorageError(
                f"{self._place.address}: this storage lets two drivers write one file, so they "
                "cannot be kept apart; use another"
            )
        for old in self._place.names(FOLDER):
            if _number(old) < number:
                self._place.remove(f"{FOLDER}/{old}")

    def renew(self) -> None:
        """Extend the lease; detects whether somebody else has taken it."""
        number, _ = current(self._place)
        if number != self._number:
            self.lost = f"{self._place.address} was taken over by another driver"
        elif self._clock() > self._mine.expires:
            # Somebody may be taking it over at this moment.
            self.lost = f"the lease on {self._place.address} ran out; this driver was too slow"
        else:
            self._mine = replace(self._mine, expires=self._clock() + self._seconds)
            self._place.write(_name(self._number), _content(self._mine))

    def require(self) -> None:
        """Stop when the lease was lost."""
        if not self.lost and self._clock() > self._mine.expires:
            self.lost = f"the lease on {self._place.address} ran out; this driver was too slow"
        if self.lost:
            raise StorageError(f"{self.lost}; run the same command again to resume")

    def _keep(self) -> None:
        while not self._stop.wait(self._seconds / 4) and not self.lost:
            try:
                self.renew()
            except StorageError:  # retried; `require` stops the work if it persists
                continue


def current(place: Place) -> tuple[int, Holder | None]:
    """The newest lease's number and holder; 0 and None in a new folder."""
    numbers = [_number(name) for name in place.names(FOLDER)]
    if not numbers or (content := place.read(_name(max(numbers)))) is None:
        return max(numbers, default=0), None
    try:
        return max(numbers), Holder(**parse_json(content))
    except (ValueError, TypeError) as error:
        name = place.path_of(_name(max(numbers)))
        raise StorageError(
            f"{name} is not a lease file; remove it if no driver is running"
        ) from error


def holder_of(place: Place) -> Holder | None:
    """Who drives the sweep in a place now, if anybody."""
    holder = current(place)[1]
    if holder is None or holder.expires < time.time() or holder.is_gone:
        return None
    return holder


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _number(name: str) -> int:
    stem = name.partition(".")[0]
    return int(stem) if stem.isdigit() else 0


def _content(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), indent=2).encode() + b"\n"


def _host() -> str:
    """This machine and its boot: process ids mean nothing beyond that."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = namespace = ""
    return f"{socket.gethostname()} {boot} {namespace}".strip()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
