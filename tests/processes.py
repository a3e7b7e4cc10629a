"""Other programs in tests: whether they run, and waiting until something is so."""

import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def until(happened: Callable[[], object], seconds: float = 10) -> bool:
    """Wait until something is so; False when it does not come about in time."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not fetched by its parent does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone(pids: Iterable[int]) -> bool:
    """Whether all of these processes end by themselves."""
    left = list(pids)
    assert left, "no processes to look for"
    return until(lambda: not any(alive(pid) for pid in left))


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
