"""Where the seconds of one command go: what the main thread does, and what runs beside it.

    python benchmarks/stages.py FILE quantize MODEL -r RECIPE ...

Runs the command in this process and writes its stages to FILE. The main thread's add up to the wall
clock: a stage within another is counted once, as the inner one. Other threads read, write and hash
meanwhile; theirs stand apart, and where they do not keep up the main thread waits, which is a stage
too. `pass` has the seconds of every block, and what the pass takes before the first and after the
last. Functions are wrapped from outside: the program itself keeps no such book.
"""

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

IMPORTS = "imports"
STAGES = {
    "opening the model": (
        "quantkit.model.source:ModelSource.open",
        "quantkit.onepass.prepare:_architecture",
        "quantkit.onepass.prepare:prepare",
    ),
    "calibration text": ("quantkit.onepass.prepare:load_tokens",),
    "estimating": ("quantkit.onepass.prepare:estimate",),
    "kernel compilation": (
        "triton.runtime.jit:JITFunction._do_compile",
        "triton.runtime.autotuner:Autotuner._bench",
    ),
    "blocks": ("quantkit.onepass.onepass:_pass", "quantkit.onepass.run:quantize_tensors"),
    "waiting for writing": (
        "quantkit.onepass.delivery:Delivery.submit",
        "quantkit.onepass.delivery:Delivery.__exit__",
    ),
    "waiting for reading": ("quantkit.model.blocks:Decoder.read_ahead",),
    "copying other tensors": ("quantkit.onepass.onepass:copy_tensor",),
    "GGUF files": ("quantkit.onepass.run:_write_file",),
    "closing": ("quantkit.export.folder:FolderWriter.close",),
    "hashing small files": ("quantkit.export.folder:hash_files",),
    "cards and manifests": ("quantkit.export.card:write", "quantkit.export.folder:write_manifest"),
}
BESIDE = {
    "writing": ("quantkit.onepass.finished_block:FinishedBlock.deliver",),
    "hashing": ("quantkit.model.file_writer:FileWriter._follow",),
}


class Book:
    """Seconds by stage of the main thread, each counted once, and sums of other threads."""

    def __init__(self) -> None:
        self.started = self._since = time.perf_counter()
        self._open: list[str] = []
        self.main: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self.marks: list[float] = []
        """When the pass began, came to each block, had done the last one, and was over."""
        self._lock = threading.Lock()

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def enter(self, stage: str) -> None:
        self._turn()
        self._open.append(stage)

    def leave(self) -> None:
        self._turn()
        self._open.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        stage = self._open[-1] if self._open else "the rest"
        self.main[stage] = self.main.get(stage, 0.0) + now - self._since
        self._since = now

    def add(self, stage: str, seconds: float) -> None:
        with self._lock:
            self.beside[stage] = self.beside.get(stage, 0.0) + seconds

    def closed(self) -> dict[str, Any]:
        self._turn()
        before, *blocks, after = [b - a for a, b in pairwise(self.marks)] or [0.0, 0.0]
        return {
            "seconds": time.perf_counter() - self.started,
            "main": self.main,
            "beside": self.beside,
            "pass": {"before": before, "blocks": blocks, "after": after},
        }


BOOK = Book()


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, and on the main thread its seconds in the book."""

    @wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        if not is_main():
            return function(*args, **more)
        is_pass = stage == "blocks" and function.__name__ == "_pass"
        BOOK.enter(stage)
        if is_pass:
            BOOK.marks.clear()  # one that ran out of memory began before
            BOOK.mark()
        try:
            made = function(*args, **more)
        finally:
            BOOK.leave()
        if is_pass:
            BOOK.mark()
        return each(stage, made) if stage.startswith("waiting") and is_generator(made) else made

    return call


def is_generator(made: Any) -> bool:
    return hasattr(made, "__next__") and hasattr(made, "send")


def each(stage: str, made: Any) -> Any:
    """What a generator yields, each step counted."""
    while True:
        BOOK.enter(stage)
        try:
            item = next(made)
        except StopIteration:
            return
        finally:
            BOOK.leave()
            BOOK.mark()
        yield item


def beside(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, and on other threads its processor's seconds in the book."""

    @wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*args, **more)
        finally:
            if not is_main():
                BOOK.add(stage, time.thread_time() - started)

    return call


def watch_imports() -> None:
    """Count what Python spends on loading modules, those apart that are loaded already."""
    machinery: Any = sys.modules["_frozen_importlib"]
    load = machinery._find_and_load
    waiting: dict[str, list[tuple[str, str, str, Callable[..., Any]]]] = {}
    for book, wrap in ((STAGES, timed), (BESIDE, beside)):
        for stage, places in book.items():
            for place in places:
                module, _, name = place.partition(":")
                waiting.setdefault(module, []).append((stage, module, name, wrap))

    def find_and_load(name: str, *more: Any) -> Any:
        if not is_main():
            return load(name, *more)
        BOOK.enter(IMPORTS)
        try:
            loaded = load(name, *more)
        finally:
            BOOK.leave()
            for module in [m for m in waiting if ready(m)]:
                for found in waiting.pop(module, []):  # `put` imports, and comes back here
                    put(*found)
        return loaded

    machinery._find_and_load = find_and_load


def ready(module: str) -> bool:
    """Whether a module is loaded to its end."""
    found = sys.modules.get(module)
    return found is not None and not getattr(found.__spec__, "_initializing", False)


def put(
    stage: str,
    module: str,
    name: str,
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap a function or method where it stands; what this version lacks is passed over."""
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    found = owner.__dict__.get(last) if owner is not None else None
    if found is None:
        return
    if isinstance(found, classmethod):
        setattr(owner, last, classmethod(wrap(stage, found.__func__)))
    else:
        setattr(owner, last, wrap(stage, found))


def main() -> None:
    out, arguments = Path(sys.argv[1]), sys.argv[2:]
    watch_imports()
    from quantkit.cli.main import main as run

    code = run(arguments)
    out.write_text(json.dumps(BOOK.closed(), indent=1))
    sys.exit(code)


if __name__ == "__main__":
    main()
