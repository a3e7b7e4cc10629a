"""A whole sweep: look up its names, lay out its graph, run what is missing, report on everything."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import StorageError
from quantkit.progress import Progress
from quantkit.sweep import cost, overview, worker
from quantkit.sweep import spec as sweep_spec
from quantkit.sweep.expand import Devices, expand
from quantkit.sweep.graph import Graph, Step
from quantkit.sweep.lease import Lease
from quantkit.sweep.place import Place
from quantkit.sweep.resolve import Resolved, resolve
from quantkit.sweep.schedule import Executor, Run

SWEEP = "sweep.json"


@dataclass(frozen=True)
class Prepared:
    """A sweep that can begin."""

    sweep: Resolved
    graph: Graph
    place: Place


def prepare(
    spec: sweep_spec.SweepSpec, base: Path, out: str, devices: Callable[[], Devices]
) -> Prepared:
    """Everything that can fail cheaply fails here."""
    place = Place(out)
    sweep = resolve(spec, base)
    return Prepared(sweep, expand(sweep, devices()), place)


def run(prepared: Prepared, executor: Executor, progress: Progress) -> Run:
    """Do what is missing of a sweep, and write the report over everything."""
    place, graph = prepared.place, prepared.graph
    place.require(cost.disk_bytes(prepared.sweep))
    with Lease(place) as lease:
        _write_plan(place, prepared)
        going = Run(graph, place, executor, prepared.sweep.spec.attempts, progress, lease)
        with _telling_what_is_kept(going):
            going.go()
        if not going.errors:
            place.remove(worker.ROOMS)
        overview.write(place, graph, going.records, going.errors)
    return going


def read_plan(place: Place) -> tuple[Graph, dict[str, Any]]:
    """The graph that a folder was last run with, and the sweep's own words."""
    content = place.read(SWEEP)
    if content is None:
        raise StorageError(
            f"{place.address} holds no sweep: it has no {SWEEP}; give the --out of `sweep run`"
        )
    try:
        data = json.loads(content)
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
        return Graph.of(steps), data["spec"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{place.told(SWEEP)} is damaged; run the sweep again") from error


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
            # What a report is of is asked for again later; the rest only machines need.
            "work": dict(step.work) if step.kind == "report" else {},
        }
        for step in prepared.graph.steps.values()
    ]
    told = {"version": 1, "spec": prepared.sweep.spec.model_dump(mode="json"), "steps": steps}
    place.write(SWEEP, json.dumps(told, indent=1, ensure_ascii=False).encode())


@contextmanager
def _telling_what_is_kept(going: Run) -> Iterator[None]:
    from quantkit.errors import Interrupted

    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(going.records)} of {len(going.graph.steps)} steps are done and kept in "
            f"{going.place.address}; run the same command again to go on from there"
        ) from None
