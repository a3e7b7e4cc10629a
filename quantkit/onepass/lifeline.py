"""A connection between the ranks of a run, on which each learns at once that another is gone.

Collectives do not notice: one that waits for a dead process waits until its time-out. But the
system closes a socket whenever its process ends, however that happens. So every rank holds a
connection to the first, which forwards what it receives: `done`, when a rank has nothing more to
share; `failed` and a sentence; or the closed connection of one that ended without a message.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from quantkit.errors import QuantkitError, RankLost

CONNECT_SECONDS = 300.0
"""Until all ranks have connected; some import their libraries from a slow disk."""
KEY = "quantkit/lifeline"
KEPT = "finished work is kept: run the same command again to resume"
MAX_LINE_BYTES = 4000
SLEEP_SECONDS = (0.0002, 0.02)
"""Polling interval, at first and at last."""


class Store(Protocol):
    """Where the ranks leave each other short messages."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Lifeline:
    """This rank's end of the connection."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.lost: str | None = None
        """What happened to another rank, in a sentence."""
        self.first_is_gone = False
        self._lines: dict[int, socket.socket] = {}
        self._done: set[int] = set()
        self._lock = threading.Lock()
        self._speaking = threading.Lock()
        self._heard = True
        """Whether anybody received the last message."""
        self._changed = threading.Event()

    @classmethod
    def open(cls, rank: int, size: int, store: Store, address: str) -> "Lifeline":
        """Connect every rank with the first, which can be reached at this address."""
        line = cls(rank, size)
        if size == 1:
            return line
        if rank == 0:
            line._receive(store)
        else:
            line._connect(store, address)
        for other, connection in line._lines.items():
            threading.Thread(target=line._listen, args=(other, connection), daemon=True).start()
        return line

    def _receive(self, store: Store) -> None:
        word = secrets.token_hex(8)  # the port is open to others, who do not know this token
        deadline = time.monotonic() + CONNECT_SECONDS
        with socket.create_server(("", 0)) as server:
            store.set(KEY, f"{server.getsockname()[1]} {word}")
            while len(self._lines) < self.size - 1:
                try:
                    server.settimeout(max(0.01, deadline - time.monotonic()))
                    connection, _ = server.accept()
                    connection.settimeout(10)
                    greeting, _, rank = _line(connection).partition(" ")
                except TimeoutError:
                    if time.monotonic() < deadline:
                        continue
                    raise RankLost(
                        f"only {len(self._lines) + 1} of {self.size} ranks came within "
                        f"{CONNECT_SECONDS:.0f} s; see the output of the others"
                    ) from None
                except OSError:  # an unrelated client that disconnected
                    continue
                if greeting != word:
                    connection.close()
                    continue
                connection.settimeout(None)
                self._lines[int(rank)] = connection

    def _connect(self, store: Store, address: str) -> None:
        self.wait(lambda: store.check([KEY]), CONNECT_SECONDS, "to start")
        port, word = store.get(KEY).decode().split()
        try:
            connection = socket.create_connection((address, int(port)), CONNECT_SECONDS)
        except OSError as error:
            raise RankLost(f"rank {self.rank} cannot reach rank 0 at {address}: {error}") from error
        connection.settimeout(None)
        connection.sendall(f"{word} {self.rank}\n".encode())
        self._lines[0] = connection

    def _listen(self, other: int, connection: socket.socket) -> None:
        while True:
            try:
                message = _line(connection)
            except OSError:
                message = ""
            kind, _, words = message.partition(" ")
            if kind == "done":
                with self._lock:
                    self._done.add(other)
            elif kind == "failed":
                self._learn(words)
            else:
                with self._lock:
                    expected = other in self._done or self.lost is not None
                if not expected:
                    self.first_is_gone = other == 0
                    self._learn(f"rank {other} ended early; {KEPT}")
                return

    def _learn(self, sentence: str) -> None:
        with self._lock:
            if self.lost is not None:
                return
            # First, since this rank closes the connection when it acts on the news.
            if self.rank == 0:
                self._say(f"failed {sentence}")
            self.lost = sentence
        self._changed.set()

    def done(self) -> None:
        """This rank no longer needs the others, nor they it."""
        self._say("done")

    def fail(self, sentence: str) -> None:
        """Tell all ranks why this one ends."""
        self._heard = self._say(f"failed rank {self.rank}: {sentence}")

    def mark_reported(self, error: QuantkitError) -> QuantkitError:
        """The same error, marked if the first rank prints it: once is enough."""
        error.is_reported = self.rank > 0 and not self.first_is_gone and self._heard
        return error

    def _say(self, line: str) -> bool:
        raw = " ".join(line.split()).encode()[:MAX_LINE_BYTES] + b"\n"
        heard = False
        with self._speaking:
            for connection in self._lines.values():
                with suppress(OSError):  # that rank is gone already
                    connection.sendall(raw)
                    heard = True
        return heard

    def close(self) -> None:
        """Close the connection."""
        for connection in self._lines.values():
            connection.close()

    def check(self) -> None:
        """Stop when another rank is lost."""
        if self.lost is not None:
            raise RankLost(self.lost)

    def news(self, seconds: float) -> str | None:
        """What happened to another rank, if a message arrives within this many seconds."""
        self._changed.wait(seconds)
        return self.lost

    def wait(self, is_over: Callable[[], bool], seconds: float | None, what: str) -> None:
        """Wait until something completes or another rank is lost; signals are handled meanwhile."""
        started = time.monotonic()
        pause, longest = SLEEP_SECONDS
        while not is_over():
            self.check()
            if seconds is not None and time.monotonic() - started > seconds:
                raise RankLost(
                    f"rank {self.rank} waited {seconds / 60:.0f} minutes for the others "
                    f"{what}; {KEPT}"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _line(connection: socket.socket) -> str:
    """One line; empty at the end of the connection."""
    found = bytearray()
    while not found.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(found) > MAX_LINE_BYTES:  # an unrelated client that never stops
            return ""
        found += byte
    return found.decode("utf-8", "replace").strip()
