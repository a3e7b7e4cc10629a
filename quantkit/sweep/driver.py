"""A whole sweep: resolve names, build the graph, run what is missing, report on everything."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import StorageError, SweepError
from quantkit.parsing import parse_json
from quantkit.progress import Progress
from quantkit.specs import plain_name
from quantkit.sweep import result, worker
from quantkit.sweep import spec as sweep_spec
from quantkit.sweep.expand import Devices, expand
from quantkit.sweep.graph import Graph, Step
from quantkit.sweep.lease import Lease
from quantkit.sweep.overview import Overview
from quantkit.sweep.place import Place
from quantkit.sweep.resolve import Resolved, resolve
from quantkit.sweep.schedule import Executor, Run, look, read_state

if TYPE_CHECKING:
    from quantkit.sweep.cost import Costs

SWEEP = "sweep.json"


@dataclass(frozen=True)
class Prepared:
    """A sweep that is ready to run."""

    sweep: Resolved
    graph: Graph
    place: Place


def prepare(
    spec: sweep_spec.SweepSpec, base: Path, place: Place, devices: Callable[[], Devices]
) -> Prepared:
    """Everything that can fail cheaply fails here."""
    sweep = resolve(spec, base)
    return Prepared(sweep, expand(sweep, devices()), place)


def run(prepared: Prepared, executor: Executor, progress: Progress) -> Overview:
    """Run what is missing of a sweep, and write the report on everything."""
    place, graph = prepared.place, prepared.graph
    there = set(place.names(result.FOLDER))
    missing = [step for step in graph.of_kind("quantize") if step.name not in there]
    from quantkit.sweep.cost import disk_bytes

    place.require(disk_bytes(prepared.sweep, missing))
    with Lease(place) as lease:
        _write_plan(place, prepared)
        going = Run(graph, place, executor, prepared.sweep.spec.attempts, progress, lease)
        with _reporting_progress(going):
            going.go()
        for name, record in going.records.items():
            if name not in going.before:
                result.tidy(place, record)
        if not going.errors:
            place.remove(worker.ROOMS)
        return _write_pages(place, graph, going.records, going.errors)


@dataclass(frozen=True)
class Estimated:
    """A graph, how much of it is done, and what the rest will cost."""

    graph: Graph
    done: frozenset[str]
    costs: "Costs"
    tasks: tuple[str, ...] = ()
    """The tasks that models are scored on."""
    has_named_tasks: bool = True
    """Whether the sweep's file names them, rather than the default."""

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "gpu": self.costs.gpu,
            "tasks": list(self.tasks),
            "steps": [
                {
                    "name": name,
                    "kind": step.kind,
                    "title": step.title,
                    "needs": list(step.needs),
                    "done": name in self.done,
                    "seconds": self.costs.steps[name].seconds,
                    "on_gpu": self.costs.steps[name].on_gpu,
                    "size_bytes": self.costs.steps[name].size_bytes,
                }
                for name, step in self.graph.steps.items()
            ],
        }


def estimated(prepared: Prepared) -> Estimated:
    """What a run would do, and what that will cost."""
    from quantkit.sweep.cost import costs

    done = look(prepared.graph, prepared.place).finished(prepared.graph)
    spec = prepared.sweep.spec
    return Estimated(
        prepared.graph,
        frozenset(done),
        costs(prepared.sweep, prepared.graph),
        tuple(spec.tasks),
        "tasks" in spec.model_fields_set,
    )


def _write_pages(*what: Any) -> Overview:
    """Import what draws pages only when there is something to draw."""
    from quantkit.sweep import pages

    return pages.write(*what)


def report(place: Place) -> Overview:
    """The report on everything that is done in a place, whoever drives it."""
    graph, _ = read_plan(place)
    state = read_state(place)
    done = look(graph, place).finished(graph, state.get("errors", {}))
    errors = {n: why for n, why in state.get("errors", {}).items() if n not in done}
    if not any(record.kind == "report" for record in done.values()):
        raise SweepError(
            f"no model of {place.address} is done yet; see `quantkit sweep status {place.address}`"
        )
    return _write_pages(place, graph, done, errors)


def read_plan(place: Place) -> tuple[Graph, dict[str, Any]]:
    """The graph that a folder was last run with, and the sweep's file."""
    content = place.read(SWEEP)
    if content is None:
        raise StorageError(
            f"{place.address} holds no sweep: it has no {SWEEP}; give the --out of `sweep run`"
        )
    try:
        data = parse_json(content)
        steps = [
            Step(
                s["kind"],
                s["title"],
                s["work"],
                s["digest"],
                tuple(s["needs"]),
                s["whatever"],
                tuple(s["after"]),
            )
            for s in data["steps"]
        ]
        for step in steps:  # folders are named after these
            plain_name(step.title)
            plain_name(step.name)
        return Graph.of(steps), data["spec"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{place.path_of(SWEEP)} is damaged; run the sweep again") from error


def _write_plan(place: Place, prepared: Prepared) -> None:
    steps = [
        {
            "name": step.name,
            "kind": step.kind,
            "title": step.title,
            "digest": step.digest,
            "needs": step.needs,
            "after": step.after,
            "whatever": step.whatever,
            # The inputs of a report are needed later; the rest only workers need.
            "work": dict(step.work) if step.kind == "report" else {},
        }
        for step in prepared.graph.steps.values()
    ]
    plan = {"version": 1, "spec": prepared.sweep.spec.model_dump(mode="json"), "steps": steps}
    place.write(SWEEP, json.dumps(plan, indent=1, ensure_ascii=False).encode())


@contextmanager
def _reporting_progress(going: Run) -> Iterator[None]:
    from quantkit.errors import Interrupted

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(going.records)} of {len(going.graph.steps)} steps are done and kept in "
            f"{going.place.address}; run the same command again to resume"
        ) from None
