"""Steps as tasks of a real Ray cluster on this machine."""

import os
import signal

import pytest
import sweeps

from quantkit.errors import HardwareError, StorageError
from quantkit.sweep.graph import Graph
from quantkit.sweep.lease import Lease
from quantkit.sweep.place import Place
from quantkit.sweep.schedule import Run
from quantkit.sweep.spec import SweepSpec

ray = pytest.importorskip("ray", reason="ray is not installed: quantkit-llm[ray]")


@pytest.fixture(scope="module")
def cluster():
    from ray import cloudpickle

    from quantkit.sweep.ray_cluster import Cluster

    cloudpickle.register_pickle_by_value(sweeps)  # workers do not know the tests
    found = Cluster(n_cpus=2)
    yield found
    found.close()
    cloudpickle.unregister_pickle_by_value(sweeps)


def spec(**more) -> SweepSpec:
    return SweepSpec.model_validate({"models": ["demo"], "recipes": ["rtn-w4a16"], **more})


def run(cluster, steps, out, workers) -> tuple[Run, sweeps.Notes]:
    notes, place = sweeps.Notes(), Place(out)
    executor = cluster.executor(spec(), notes, workers.functions)
    with Lease(place) as lease:
        going = Run(Graph.of(steps), place, executor, 3, notes, lease)
        going.go()
    return going, notes


def test_results_are_those_of_a_run_here(cluster, tmp_path):
    steps = sweeps.line().values()
    there, _ = run(cluster, steps, tmp_path / "there", sweeps.Workers())
    here, _ = sweeps.run(steps, tmp_path / "here", sweeps.Workers())
    assert {n: r.identity for n, r in there.records.items()} == {
        n: r.identity for n, r in here.records.items()
    }
    logs = list((tmp_path / "there" / "logs").glob("*/1.log"))
    assert len(logs) == len(there.records)


def test_a_step_that_kills_its_process_is_given_up_and_the_others_go_on(cluster, tmp_path):
    def die(step, time) -> bool:
        if step.title == "verify one":
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    going, notes = run(cluster, sweeps.line().values(), tmp_path, sweeps.Workers(fail=die))
    steps = sweeps.line()
    assert going.failed == [steps["verify one"].name]
    assert going.errors[steps["verify one"].name] == "its process was killed, or crashed"
    assert steps["score two"].name in going.records
    assert steps["report"].name in going.records
    assert sum("attempt" in note for note in notes.notes) == 3


def test_a_process_killed_once_costs_nothing_but_time(cluster, tmp_path):
    mark = tmp_path / "mark"

    def die_once(step, time) -> bool:
        if step.title == "two" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    workers = sweeps.Workers(fail=die_once)
    going, _ = run(cluster, sweeps.line().values(), tmp_path / "runs", workers)
    assert not going.errors
    here, _ = sweeps.run(sweeps.line().values(), tmp_path / "here", sweeps.Workers())
    assert {n: r.identity for n, r in going.records.items()} == {
        n: r.identity for n, r in here.records.items()
    }


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"quantize": {"gpus": 64}}, "resources.quantize asks for 64 GPUs, and no node"),
        ({"score": {"cpus": 999}}, "resources.score asks for 999 cores, and no node"),
        ({"verify": {"memory": "900TiB"}}, "of memory, and no node of the cluster has more than"),
    ],
)
def test_what_no_node_has_is_told_before_the_start(cluster, tmp_path, resources, words):
    with pytest.raises(HardwareError, match=words):
        cluster.check(spec(resources=resources), Place(tmp_path))


def test_a_folder_that_a_node_does_not_see_is_refused(cluster, tmp_path, monkeypatch):
    from quantkit.sweep import ray_cluster

    cluster.check(spec(), Place(tmp_path))
    monkeypatch.setattr(ray_cluster, "_sees", lambda path: ("far-away", False))
    with pytest.raises(StorageError, match="node far-away does not see"):
        cluster.check(spec(), Place(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_not_asked_of_a_cluster_that_has_none(cluster):
    found = cluster.devices(spec())
    assert (found.quantize, found.score) == ("cpu", "cpu")
    with pytest.raises(HardwareError, match="no node of the cluster has a GPU"):
        cluster.devices(spec(device="cuda"))
