"""GPU names and peak memory use, from `nvidia-smi`."""

import shutil
import subprocess
import threading
from types import TracebackType

INTERVAL_S = 0.5


def gpu_names() -> list[str]:
    """GPUs of this machine; none without a driver."""
    return _query("name")


def used_bytes() -> int | None:
    """Memory in use on all GPUs together; None if unknown."""
    values = _query("memory.used")
    if not values or not all(value.isdecimal() for value in values):
        return None
    return sum(map(int, values)) << 20


def _query(field: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


class Peak:
    """Peak memory in use since entering the `with` block, above what was in use before."""

    def __init__(self) -> None:
        self._before = used_bytes()
        self._most = self._before or 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        if self._before is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def bytes(self) -> int | None:
        """None on a machine without such GPUs."""
        if self._before is None:
            return None
        self._most = max(self._most, used_bytes() or 0)
        return self._most - self._before

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._most = max(self._most, used_bytes() or 0)
