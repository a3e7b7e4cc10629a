"""Where a run's time goes: to its stages, and to its recipes."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """How long the run and each of its stages took, and how much of it each recipe took.

    A recipe's seconds are those of its own work and an equal share of the common work, so the
    seconds of all recipes add up to those of the run.
    """

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._lock = threading.Lock()
        self._own: defaultdict[str, float] = defaultdict(float)
        self._running: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        """GPU events; the GPU keeps working while the clock is read."""
        self.stages: dict[str, float] = {}
        self.n_recipes = 1
        """The run's recipes, once known."""

    def lap(self, stage: str) -> None:
        """The stage that ended just now."""
        now = time.monotonic()
        self.stages[stage], self._last = now - self._last, now

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    @contextmanager
    def of(self, name: str, part: float = 1.0) -> Iterator[None]:
        """Attribute the time within to a recipe; where threads run in parallel, a share of it."""
        started = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._own[name] += part * (time.monotonic() - started)

    @contextmanager
    def on(self, device: torch.device, name: str) -> Iterator[None]:
        """The same for work on a device, without synchronising."""
        if device.type != "cuda":
            with self.of(name):
                yield
            return
        begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(device)  # of this device, whichever is the current one
        begun.record(stream)
        try:
            yield
        finally:
            ended.record(stream)
            self._running.append((name, begun, ended))

    def seconds_of(self, name: str) -> float:
        """A recipe's seconds, once its work is done."""
        for other, begun, ended in self._running:
            ended.synchronize()
            self._own[other] += begun.elapsed_time(ended) / 1000
        self._running.clear()
        shared = max(0.0, self.seconds - sum(self._own.values()))
        return self._own[name] + shared / self.n_recipes
