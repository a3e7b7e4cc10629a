"""What a sweep costs beside its steps: planning, and Ray's part in running.

    python benchmarks/sweep.py -o benchmarks/results/ray-overhead.json

Steps here do nothing but write one small file, so that all time is overhead: a chain in which each
waits for the one before tells the time of one step, and a thousand that need nothing how many
there are in a minute. Needs ray; everything runs on this machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recording import write

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def empty(steps: Any, bench: Any) -> Any:
    """A result with nothing in it."""
    from quantkit.sweep.result import Product

    made = []
    for step in steps:
        folder = bench.room / step.name
        folder.mkdir()
        (folder / "text").write_text(step.title)
        made.append(Product(folder, step.digest, {}))
    return made


def steps(n: int, chained: bool) -> list[Any]:
    """Steps in a row, or side by side."""
    from quantkit.sweep.graph import Step, digest_of

    made: list[Step] = []
    for number in range(n):
        needs = (made[-1].name,) if chained and made else ()
        digest = digest_of("verify", {"number": number, "chained": chained})
        made.append(Step("verify", f"empty {number}", {}, digest, needs, together=digest))
    return made


def seconds_of(made: list[Any], cluster: Any, folder: Path) -> float:
    """To run steps on the cluster, results and logs written, under a lease."""
    from quantkit.progress import Silent
    from quantkit.sweep.graph import Graph
    from quantkit.sweep.lease import Lease
    from quantkit.sweep.place import Place
    from quantkit.sweep.schedule import Run
    from quantkit.sweep.spec import SweepSpec

    spec = SweepSpec.model_validate({"models": ["demo"], "recipes": ["rtn-w4a16"]})
    executor = cluster.executor(spec, Silent(), {"verify": empty})
    place, begun = Place(folder), time.perf_counter()
    with Lease(place) as lease:
        run = Run(Graph.of(made), place, executor, 3, Silent(), lease)
        run.go()
    assert len(run.records) == len(made), run.errors
    return time.perf_counter() - begun


def planning(n_steps: int, folder: Path) -> dict[str, Any]:
    """A sweep of about as many steps: names looked up, digests made, results looked for."""
    from quantkit.recipe import Recipe
    from quantkit.sweep.expand import Devices, expand
    from quantkit.sweep.graph import Step
    from quantkit.sweep.place import Place
    from quantkit.sweep.resolve import Calibration, Model, Resolved, Unit
    from quantkit.sweep.schedule import look
    from quantkit.sweep.spec import SweepSpec

    base = Recipe.load("gptq-w4a16")
    tasks = [f"task{n}" for n in range(8)]
    sets = [Calibration(f"set{n}", {"number": n}, {"name": f"set{n}"}) for n in range(5)]
    recipes = [base.model_copy(update={"name": f"recipe{n}"}) for n in range(20)]
    n_models = max(1, round(n_steps / (len(recipes) * len(sets) * (2 + len(tasks)))))
    spec = SweepSpec.model_validate(
        {
            "models": [f"model{n}" for n in range(n_models)],
            "recipes": [r.name for r in recipes],
            "tasks": tasks,
        }
    )
    sweep = Resolved(
        spec,
        tuple(Model(f"model{n}", f"model{n}", None, str(n), False) for n in range(n_models)),
        tuple(recipes),
        tuple(sets),
        tuple(Unit(task, task) for task in tasks),
        {},
        None,
    )
    begun, used = time.perf_counter(), time.process_time()
    graph = expand(sweep, Devices("cuda", "cuda"))
    laid_out, used_first = time.perf_counter() - begun, time.process_time() - used
    place = Place(folder)
    fill(place, list(graph.steps.values()))
    begun, used = time.perf_counter(), time.process_time()
    done = look(graph, place).finished(graph)
    looked, used_then = time.perf_counter() - begun, time.process_time() - used
    assert len(done) == len(graph.steps)
    assert all(isinstance(step, Step) for step in graph.steps.values())
    return {
        "steps": len(graph.steps),
        "seconds_to_lay_out": laid_out,
        "seconds_to_find_all_results": looked,
        "seconds": laid_out + looked,
        "seconds_of_cpu": used_first + used_then,
        "limit": 5,
    }


def fill(place: Any, made: list[Any]) -> None:
    """A finished result for every step, as workers leave them."""
    from quantkit.sweep.result import Record

    for step in made:
        record = Record(
            step=step.name,
            kind=step.kind,
            title=step.title,
            digest=step.digest,
            inputs={name: name for name in step.needs},
            identity=step.name,
            folder="0",
            files={},
            seconds=1.0,
        ).sealed()
        path = place.local / "results" / step.name / "step.json"
        path.parent.mkdir(parents=True)
        path.write_text(record.model_dump_json())


def main() -> None:
    """Measure, and write it down."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--chain", type=int, default=50)
    arguments.add_argument("--wide", type=int, default=1000)
    arguments.add_argument("--graph", type=int, default=10_000)
    arguments.add_argument("-o", "--out", type=Path)
    asked = arguments.parse_args()
    import ray

    from quantkit.sweep.ray_cluster import Cluster

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planned = planning(asked.graph, folder / "planned")
        begun = time.perf_counter()
        cluster = Cluster(n_cpus=2)
        started = time.perf_counter() - begun
        try:
            warm = seconds_of(steps(8, False), cluster, folder / "warm")
            chain = seconds_of(steps(asked.chain, True), cluster, folder / "chain")
            wide = seconds_of(steps(asked.wide, False), cluster, folder / "wide")
        finally:
            cluster.close()
    record = {
        "what": "a sweep's own time: planning, and empty steps on a local Ray cluster",
        "versions": {"ray": ray.__version__, "python": sys.version.split()[0]},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "planning": planned,
        "cluster": {"seconds_to_start": started, "seconds_of_the_first_8_steps": warm},
        "chain": {
            "steps": asked.chain,
            "seconds": chain,
            "seconds_a_step": chain / asked.chain,
            "limit": 0.5,
        },
        "side_by_side": {"steps": asked.wide, "seconds": wide, "limit": 120 * asked.wide / 1000},
    }
    print(json.dumps(record, indent=2))
    if asked.out:
        write(asked.out, record)


if __name__ == "__main__":
    main()
