"""What tests of sweeps share: small graphs of steps that need no model."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from notes import Notes

from quantkit.sweep.graph import Graph, Step, digest_of
from quantkit.sweep.lease import Lease
from quantkit.sweep.local import LocalExecutor
from quantkit.sweep.place import Place
from quantkit.sweep.result import Product
from quantkit.sweep.schedule import Run
from quantkit.sweep.worker import Bench, Functions, Job, Outcome, execute


def step(kind: str, title: str, *needs: Step, content: str = "", **more: Any) -> Step:
    """A step whose result is its content, after what it needs."""
    digest = digest_of(kind, {"content": content}, [n.digest for n in needs])
    names = tuple(n.name for n in needs)
    more.setdefault("together", f"{kind} {title}")
    return Step(kind, title, {"content": content, "title": title}, digest, names, **more)


class Workers:
    """Does such steps, and counts them; `fail` decides which go wrong."""

    def __init__(self, fail: Callable[[Step, int], bool] = lambda step, time: False) -> None:
        self.jobs: list[list[str]] = []
        self.times: dict[str, int] = {}
        self._fail = fail

    @property
    def done(self) -> list[str]:
        return [title for job in self.jobs for title in job]

    def work(self, steps: Sequence[Step], bench: Bench) -> list[Product]:
        self.jobs.append([s.title for s in steps])
        products = []
        for one in steps:
            self.times[one.title] = self.times.get(one.title, 0) + 1
            if self._fail(one, self.times[one.title]):
                raise ValueError(f"{one.title} went wrong")
            given_up = one.work.get("given_up", ())
            parts = [bench.folder_of(n) / "text" for n in one.needs if n not in given_up]
            text = one.work["content"] + "".join(f"({p.read_text()})" for p in parts)
            folder = bench.room / one.name
            folder.mkdir()
            (folder / "text").write_text(text)
            identity = hashlib.sha256(text.encode()).hexdigest()
            products.append(Product(folder, identity, {"length": len(text)}))
        return products

    @property
    def functions(self) -> dict[str, Any]:
        return dict.fromkeys(("calibrate", "quantize", "verify", "score", "report"), self.work)


class SideBySide:
    """Does all jobs that are ready at once, as machines of a cluster would."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._jobs: list[Job] = []

    def bundle(self, step: Step) -> str:
        return step.together

    def room(self) -> int:
        return 100

    def start(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self) -> list[tuple[Job, Outcome]]:
        jobs, self._jobs = self._jobs, []
        return [(job, execute(job, None, self._functions)) for job in jobs]


def run(
    steps: Sequence[Step],
    out: Path | str,
    workers: Workers,
    attempts: int = 3,
    side_by_side: bool = False,
) -> tuple[Run, Notes]:
    """Run steps here, under a lease."""
    notes = Notes()
    place = Place(out)
    functions = workers.functions
    executor = SideBySide(functions) if side_by_side else LocalExecutor(notes, functions)
    with Lease(place) as lease:
        going = Run(Graph.of(steps), place, executor, attempts, notes, lease)
        going.go()
    return going, notes


def line() -> dict[str, Step]:
    """A set, two recipes of one pass, their checks and scores, a source, a report."""
    source = step("score", "source", content="s")
    chosen = step("calibrate", "set", content="c")
    one = step("quantize", "one", chosen, content="1", together="quantize pass")
    two = step("quantize", "two", chosen, content="2", together="quantize pass")
    checks = [step("verify", f"verify {s.title}", s) for s in (one, two)]
    scores = [
        step("score", f"score {s.title}", s, check, source, content="x")
        for s, check in zip((one, two), checks, strict=True)
    ]
    report = step("report", "report", source, *scores, whatever=True)
    listed = [source, chosen, one, two, *checks, *scores, report]
    return {s.title: s for s in listed}
