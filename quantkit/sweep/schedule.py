"""Runs a graph: ready steps are started, failed ones are retried, the rest continues.

An executor does the work. This module decides what is done at all: a step whose result exists and
is sound is not run again, and one that failed too often is given up, with everything that needs it,
while the others continue.
"""

import json
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quantkit.errors import StorageError
from quantkit.parsing import parse_json
from quantkit.progress import Progress
from quantkit.storage import duration
from quantkit.sweep import result
from quantkit.sweep.graph import Graph, Step
from quantkit.sweep.lease import Lease
from quantkit.sweep.place import Place
from quantkit.sweep.result import Record
from quantkit.sweep.worker import Job, Outcome, log_name

STATE = "state.json"
SECONDS_BETWEEN_STATES = 1.0
DEATHS = 20
"""A step may lose this many machines: beyond that, it is what kills them."""
MOST_NOTED = 300
"""For sweeps with more steps, only faults are reported as they come."""


def read_state(place: Place) -> dict[str, Any]:
    """What the last driver reported; empty where there was none."""
    content = place.read(STATE)
    try:
        state = parse_json(content or b"{}")
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise StorageError(f"{place.path_of(STATE)} is damaged; remove it, or run the sweep again")
    return state


class Executor(Protocol):
    """Runs jobs, here or elsewhere."""

    def bundle(self, step: Step) -> str:
        """A key shared by steps that form one job."""

    def room(self) -> int:
        """How many more jobs it accepts now."""

    def start(self, job: Job) -> None:
        """Accept a job."""

    def wait(self) -> list[tuple[Job, Outcome]]:
        """Jobs that ended since; returns now and then, even with none."""


@dataclass(frozen=True)
class Plan:
    """How much of a graph is done already."""

    records: Mapping[str, Record]
    """Results that are complete and of the same step, by name."""
    remade: Mapping[str, str]
    """Steps whose results exist but cannot be used, and why."""

    def finished(self, graph: Graph, given_up: Container[str] = ()) -> dict[str, Record]:
        """Results that need not be made again: they fit what they were made from."""
        done: dict[str, Record] = {}
        for name, step in graph.steps.items():
            record = self.records.get(name)
            there = all(n in done or (step.whatever and n in given_up) for n in step.needs)
            if record and there and _fits(record, step, done):
                done[name] = record
        return done


def _fits(record: Record, step: Step, done: Mapping[str, Record]) -> bool:
    return record.inputs == {n: done[n].identity for n in step.needs if n in done}


def look(graph: Graph, place: Place) -> Plan:
    """Which steps have results that can be trusted."""
    records: dict[str, Record] = {}
    remade: dict[str, str] = {}
    for name, record in result.load_all(place, graph.steps).items():
        if wrong := result.faults(place, record):
            remade[name] = wrong[0]
        elif record.digest != graph.steps[name].digest or record.step != name:
            remade[name] = f"{place.path_of(name)} is the result of another step"
        else:
            records[name] = record
    return Plan(records, remade)


@dataclass
class Run:
    """A sweep in progress: the state of every step."""

    graph: Graph
    place: Place
    executor: Executor
    attempts: int
    progress: Progress
    lease: Lease | None = None
    records: dict[str, Record] = field(default_factory=dict)
    """Records of finished steps, by name."""
    tries: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Why steps were given up: they failed too often, or need one that did."""
    failed: list[str] = field(default_factory=list)
    """Those that failed themselves."""
    running: dict[str, float] = field(default_factory=dict)
    before: frozenset[str] = frozenset()
    """Steps that were finished at the start."""
    _found: dict[str, Record] = field(default_factory=dict)
    _waiting: dict[str, int] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)
    _alone: set[str] = field(default_factory=set)
    _ready: dict[str, None] = field(default_factory=dict)
    _written: float = 0.0

    def go(self) -> None:
        """Run everything that can be run."""
        self._begin()
        while self._ready or self.running:
            if self.lease is not None:
                self.lease.require()
            for job in self._jobs():
                for step in job.steps:
                    self.running[step.name] = time.time()
                self.executor.start(job)
            self._write_state()
            for job, outcome in self.executor.wait():
                self._take(job, outcome)
        if self.lease is not None:
            self.lease.require()  # what follows would disturb another driver
        self._write_state(now=True)

    @property
    def n_ended(self) -> int:
        """Steps that are finished or given up."""
        return len(self.records) + len(self.errors)

    def _begin(self) -> None:
        plan = look(self.graph, self.place)
        for name, why in plan.remade.items():
            self.progress.note(f"made again: {why}")
            result.forget(self.place, name)
        self._found = dict(plan.records)
        for name, step in self.graph.steps.items():
            self._waiting[name] = len({*step.needs, *step.after})
            if not self._waiting[name]:
                self._ready[name] = None
        self._adopt()
        self.before = frozenset(self.records)
        if self.before:
            n = len(self.before)
            self.progress.note(f"{n} of {len(self.graph.steps)} steps are already done")

    def _adopt(self) -> None:
        """Adopt earlier results that fit, instead of making them again."""
        queue = list(self._ready)
        for name in queue:
            record = self._found.get(name)
            if record is not None and _fits(record, self.graph.steps[name], self.records):
                del self._ready[name]
                self.records[name] = record
                queue += self._ended(name)

    def _jobs(self) -> list[Job]:
        """As many ready steps as are accepted, with those that belong together in one job."""
        self._adopt()
        bundles: dict[str, list[Step]] = {}
        for name in self._ready:
            step = self.graph.steps[name]
            key = name if name in self._alone else self.executor.bundle(step)
            bundles.setdefault(key, []).append(step)
        taken = list(bundles.values())[: self.executor.room()]
        for step in (step for steps in taken for step in steps):
            del self._ready[step.name]
        return [self._job(steps) for steps in taken]

    def _job(self, steps: list[Step]) -> Job:
        needed = {n for step in steps for n in step.needs}
        given_up = sorted(n for n in needed if n in self.errors)
        if given_up:  # only a report continues without some of what it needs
            steps = [replace(s, work={**s.work, "given_up": given_up}) for s in steps]
        return Job(
            self.place,
            tuple(steps),
            {name: self.records[name] for name in sorted(needed) if name in self.records},
            {step.name: self.tries.get(step.name, 0) + 1 for step in steps},
        )

    def _take(self, job: Job, outcome: Outcome) -> None:
        for step in job.steps:
            self.running.pop(step.name, None)
        again = self.tries.get(outcome.tampered, 0) < self.attempts - 1
        if outcome.tampered and outcome.tampered in self.records and again:
            self._make_again(outcome.tampered, outcome.error)
            self._wait_again(job.steps)
            return
        if self._is_being_made(outcome.tampered):  # another job found it first
            self._wait_again(job.steps)
            return
        made = {record.step: record for record in outcome.records}
        if made:
            self._tell(job, outcome)
        for step in job.steps:
            if step.name in made:
                self.records[step.name] = made[step.name]
                self._ended(step.name)
            elif outcome.died and self._died(step) < DEATHS:
                self.progress.note(f"{step.kind} {step.title}: {outcome.error}; started again")
                self._wait_again([step])
            else:
                self._failed(step, outcome, len(job.steps) > 1)

    def _tell(self, job: Job, outcome: Outcome) -> None:
        """One line per job, where that is not too many lines."""
        ended = self.n_ended + len(outcome.records)
        took = duration(sum(record.seconds for record in outcome.records))
        line = f"{ended}/{len(self.graph.steps)} {job.title}: {took}"
        (self.progress.note if len(self.graph.steps) <= MOST_NOTED else self.progress.detail)(line)

    def _died(self, step: Step) -> int:
        self._deaths[step.name] = self._deaths.get(step.name, 0) + 1
        return self._deaths[step.name]

    def _failed(self, step: Step, outcome: Outcome, in_company: bool) -> None:
        self.tries[step.name] = self.tries.get(step.name, 0) + 1
        number = self.tries[step.name]
        log = log_name(step.name, number)
        if self.place.read(log) is None:  # the worker that should have written it is gone
            self.place.write(log, f"{outcome.error}\n".encode())
        if number < self.attempts and not outcome.died and not outcome.final:
            if in_company:  # a step that spoils a shared pass must not spoil the next
                self._alone.add(step.name)
            self.progress.note(
                f"{step.kind} {step.title}: attempt {number} of {self.attempts} failed: "
                f"{outcome.error}"
            )
            self._wait_again([step])
            return
        self.failed.append(step.name)
        self.errors[step.name] = outcome.error
        times = f"{number} attempt{'s' * (number > 1)}"
        self.progress.note(
            f"{step.kind} {step.title}: given up after {times}: {outcome.error}; "
            f"see {self.place.path_of(log)}"
        )
        self._give_up_followers(step.name)
        self._ended(step.name)

    def _give_up_followers(self, name: str) -> None:
        """Everything that needs a step that was given up."""
        for other in self.graph.followers[name]:
            step = self.graph.steps[other]
            if name in step.needs and not step.whatever and other not in self.errors:
                first = self.graph.steps[name]
                self.errors[other] = f"needs {first.kind} {first.title}, which was given up"
                self._ready.pop(other, None)
                self._give_up_followers(other)
                self._ended(other)

    def _ended(self, name: str) -> list[str]:
        """Steps that are ready now that one has ended."""
        ready = []
        for other in self.graph.followers[name]:
            if other in self.records or other in self.errors:
                continue
            self._waiting[other] -= 1
            if not self._waiting[other]:
                self._ready[other] = None
                ready.append(other)
        return ready

    def _make_again(self, name: str, why: str) -> None:
        """Redo a finished step whose result turned out to be changed."""
        self.progress.note(f"made again: {why}")
        result.forget(self.place, name)
        del self.records[name]
        self.tries[name] = self.tries.get(name, 0) + 1
        self._found.pop(name, None)
        for other in self.graph.followers[name]:
            if other not in self.records and other not in self.errors:
                self._waiting[other] += 1
                self._ready.pop(other, None)
        self._ready[name] = None

    def _is_being_made(self, name: str) -> bool:
        return name in self.graph.steps and name not in self.records and name not in self.errors

    def _wait_again(self, steps: Iterable[Step]) -> None:
        """Steps that are to run once more: now, or when their inputs are available again."""
        for step in steps:
            if not self._waiting[step.name]:
                self._ready[step.name] = None

    def _write_state(self, now: bool = False) -> None:
        """What `status` reports about a sweep in progress."""
        if not now and time.monotonic() - self._written < SECONDS_BETWEEN_STATES:
            return
        self._written = time.monotonic()
        state: dict[str, Any] = {
            "updated": time.time(),
            "running": self.running,
            "failed": self.failed,
            "errors": self.errors,
            "tries": self.tries,
        }
        self.place.write(STATE, json.dumps(state, indent=1, ensure_ascii=False).encode())
