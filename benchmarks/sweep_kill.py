"""Kill test: sweeps on a real local cluster of three nodes, each disturbed at a random moment.

    python benchmarks/sweep_kill.py --sweeps 20 -o benchmarks/results/ray-kill.json

One sweep runs undisturbed. In each of the others a node or the driver is killed, without notice;
a killed driver is started again. All must end, with results identical to the first. With `--light`
steps only wait and write a file, for machines on which models take too long to load.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # machines may be busy

SECONDS = 600
"""A driver that takes longer is taken to hang."""
SWEEP = {
    "models": ["demo"],
    "recipes": ["rtn-w4a16", "gptq-w4a16"],
    "calibration": [{"set": "text.txt", "samples": 4, "length": 32}],
    "tasks": ["python_quiz"],
    "limit": 2,
    "max_length": 64,
}
TEXT = "\n\n".join(
    f"Lesson {n}. A list holds {n} items, a set holds at most {n * n}, and a function of {n} "
    f"arguments returns the {n}th of them when it is called with numbers from {n} to {3 * n}."
    for n in range(2, 120)
)


@dataclass(frozen=True)
class Trial:
    """One disturbed sweep."""

    victim: str
    after_results: int
    """Steps that were finished when it was killed."""
    n_starts: int
    """Of the driver."""
    seconds: float
    was_running: bool
    """Whether the driver was still at work when the kill came."""
    identical: bool


def wait_and_write(steps: Any, bench: Any) -> Any:
    """A light step: half a second, and a text made of what it needs."""
    import hashlib

    from quantkit.sweep.result import Product

    made = []
    for step in steps:
        time.sleep(0.5)
        inputs = [(bench.folder_of(name) / "text").read_text() for name in step.needs]
        text = hashlib.sha256("".join([step.title, *inputs]).encode()).hexdigest()
        folder = bench.room / step.name
        folder.mkdir()
        (folder / "text").write_text(text)
        made.append(Product(folder, text, {}))
    return made


def drive_light(out: Path, address: str) -> None:
    """A driver of light steps: eight lines of four, and one that needs them all."""
    from quantkit.progress import Silent
    from quantkit.sweep.graph import Graph, Step, digest_of
    from quantkit.sweep.lease import Lease
    from quantkit.sweep.place import Place
    from quantkit.sweep.ray_cluster import Cluster
    from quantkit.sweep.schedule import Run
    from quantkit.sweep.spec import SweepSpec

    steps: list[Step] = []

    def add(title: str, needs: tuple[str, ...]) -> str:
        digest = digest_of("verify", {"title": title}, needs)
        steps.append(Step("verify", title, {}, digest, needs, together=title))
        return steps[-1].name

    ends = []
    for line in range(8):
        name: tuple[str, ...] = ()
        for number in range(4):
            name = (add(f"line {line} step {number}", name),)
        ends += name
    add("end", tuple(ends))
    spec = SweepSpec.model_validate({"models": ["demo"], "recipes": ["rtn-w4a16"]})
    cluster, place = Cluster(address), Place(out)
    cluster.check(spec, place)
    with Lease(place) as lease:
        executor = cluster.executor(spec, Silent(), {"verify": wait_and_write})
        run = Run(Graph.of(steps), place, executor, 3, Silent(), lease)
        run.go()
    cluster.close()
    sys.exit(bool(run.errors))


class Nodes:
    """Three nodes of Ray on this machine, each with processes of its own."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        self._others = [self._cluster.add_node(num_cpus=1) for _ in range(2)]
        self.address = self._cluster.address

    def kill_one(self, chance: random.Random) -> None:
        """Without notice; another node takes its place."""
        victim = self._others.pop(chance.randrange(len(self._others)))
        self._cluster.remove_node(victim, allow_graceful=False)
        self._others.append(self._cluster.add_node(num_cpus=1))

    def close(self) -> None:
        self._cluster.shutdown()


def start(folder: Path, out: Path, address: str) -> subprocess.Popen[str]:
    """A driver, as a user would start it."""
    file = folder / "sweep.yaml"
    words = ["-m", "quantkit", "sweep", "run", str(file), "-o", str(out)]
    words += ["--on", "ray", "--address", address]
    if not file.is_file():
        words = [__file__, "--drive", str(out), address]
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(driver: subprocess.Popen[str]) -> None:
    """Wait for a driver that must succeed."""
    output, _ = driver.communicate(timeout=SECONDS)
    if driver.returncode:
        raise SystemExit(f"the driver ended with {driver.returncode}:\n{output}")


def results(out: Path) -> dict[str, tuple[str, Any]]:
    """What a sweep made: identities of all results, and the hashes of all weights."""
    found = {}
    for path in sorted((out / "results").glob("*/step.json")):
        record = json.loads(path.read_text())
        weights = {n: f["sha256"] for n, f in record["files"].items() if n.endswith(".safetensors")}
        found[record["step"]] = (record["identity"], weights)
    return found


def n_results(out: Path) -> int:
    """Steps that are finished."""
    return sum(1 for _ in (out / "results").glob("*/step.json"))


def prepare(folder: Path) -> None:
    """The sweep's file and its text."""
    (folder / "sweep.yaml").write_text(json.dumps(SWEEP))
    (folder / "text.txt").write_text(TEXT)


def undisturbed(folder: Path, nodes: Nodes) -> tuple[dict[str, tuple[str, Any]], float]:
    """The results that all others must have, and how long they take."""
    begun = time.monotonic()
    ended(start(folder, folder / "undisturbed", nodes.address))
    return results(folder / "undisturbed"), time.monotonic() - begun


def disturbed(
    folder: Path,
    nodes: Nodes,
    wanted: dict[str, tuple[str, Any]],
    usual: float,
    number: int,
    chance: random.Random,
) -> Trial:
    """One sweep with one kill."""
    out, begun = folder / f"disturbed-{number}", time.monotonic()
    victim = chance.choice(["node", "driver"])
    # By what is done rather than by the clock, so that the kill comes while there is work.
    moment, more = chance.randrange(len(wanted)), chance.uniform(0, usual / len(wanted))
    driver = start(folder, out, nodes.address)
    while driver.poll() is None and n_results(out) < moment:
        time.sleep(0.1)
    with suppress(subprocess.TimeoutExpired):
        driver.wait(more)
    running, done = driver.poll() is None, n_results(out)
    n_starts = 1
    if victim == "node":
        nodes.kill_one(chance)
    elif running:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        driver, n_starts = start(folder, out, nodes.address), 2
    ended(driver)
    return Trial(
        victim,
        done,
        n_starts,
        round(time.monotonic() - begun, 1),
        running,
        results(out) == wanted,
    )


def main() -> None:
    """Run the trials and write down what came of them."""
    from recording import recorded  # here, since a test loads this file from elsewhere

    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sweeps", type=int, default=20)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--light", action="store_true")
    arguments.add_argument("--drive", nargs=2, metavar=("OUT", "ADDRESS"))
    arguments.add_argument("-o", "--out", type=Path)
    asked = arguments.parse_args()
    if asked.drive:
        drive_light(Path(asked.drive[0]), asked.drive[1])
    import ray

    chance, trials = random.Random(asked.seed), []

    what = "steps that wait and write" if asked.light else "the demo model"

    def record() -> str:
        told = {
            "what": f"sweeps over {what} on three local nodes, a node or the driver killed",
            "versions": {"ray": ray.__version__, "python": sys.version.split()[0]},
            "cores": os.cpu_count(),
            "seed": asked.seed,
            "steps": len(wanted),
            "seconds_undisturbed": round(usual, 1),
            "sweeps": len(trials),
            "identical": sum(trial.identical for trial in trials),
            "killed_while_running": sum(trial.was_running for trial in trials),
            "trials": [vars(trial) for trial in trials],
            "recorded": recorded(),
        }
        return json.dumps(told, indent=2) + "\n"

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not asked.light:
            prepare(folder)
        nodes = Nodes()
        try:
            wanted, usual = undisturbed(folder, nodes)
            print(f"undisturbed: {len(wanted)} steps in {usual:.0f} s", flush=True)
            for number in range(asked.sweeps):
                trials.append(disturbed(folder, nodes, wanted, usual, number, chance))
                print(number + 1, trials[-1], flush=True)
                if asked.out:  # at once: what was seen so far stands, whatever comes
                    asked.out.write_text(record())
        finally:
            nodes.close()
    print(record())


if __name__ == "__main__":
    main()
