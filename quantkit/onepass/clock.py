"""Where a run's seconds go: to its stages, and to the recipes that it makes."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """How long the run and each of its stages took, and what of it was one recipe's alone.

    A recipe's seconds are those of its own work and an equal part of what no single one needs, so
    that the seconds of all add up to those of the run.
    """

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._lock = threading.Lock()
        self._own: defaultdict[str, float] = defaultdict(float)
        self._running: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        """On a GPU, which works on while the clock is read."""
        self.stages: dict[str, float] = {}
        self.n_recipes = 1
        """That the run makes, once it is known."""

    def lap(self, stage: str) -> None:
        """The stage that ended just now."""
        now = time.monotonic()
        self.stages[stage], self._last = now - self._last, now

    @property
    def seconds(self) -> float:
        """Of the run until now."""
        return time.monotonic() - self._started

    @contextmanager
    def of(self, name: str, part: float = 1.0) -> Iterator[None]:
        """Count the time within to a recipe; where threads work side by side, a part of it."""
        started = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._own[name] += part * (time.monotonic() - started)

    @contextmanager
    def on(self, device: torch.device, name: str) -> Iterator[None]:
        """The same for what a device computes, without waiting for it."""
        if device.type != "cuda":
            with self.of(name):
                yield
            return
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(device)  # of this device, whichever is the usual one
        begun.record(stream)
        try:
            yield
        finally:
            ended.record(stream)
            self._running.append((name, begun, ended))

    def seconds_of(self, name: str) -> float:
        """A recipe's, once its work is done."""
        for other, begun, ended in self._running:
            ended.synchronize()
            self._own[other] += begun.elapsed_time(ended) / 1000
        self._running.clear()
        shared = max(0.0, self.seconds - sum(self._own.values()))
        return self._own[name] + shared / self.n_recipes
