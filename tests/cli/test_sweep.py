"""`quantkit sweep`: what is refused before any work, and what is told of a sweep."""

import importlib.util
import json
import socket

import pytest
import sweeps

from quantkit import resources
from quantkit.sweep import driver
from quantkit.sweep.place import Place

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: quantkit-llm[ray]"
)


@pytest.fixture
def refused(run_cli, tmp_path):
    """Run a sweep that cannot be: one message, which is returned, and nothing written."""

    def run(text: str, *more: str, out: str = "", code: int = 3) -> str:
        path, out = tmp_path / "sweep.yaml", out or str(tmp_path / "runs")
        path.write_text(text)
        result = run_cli(["sweep", "run", path, "-o", out, *more])
        assert (result.code, result.stdout) == (code, "")
        assert "Traceback" not in result.stderr
        assert not (tmp_path / "runs" / "results").exists()
        return result.stderr.split("quantkit: ")[-1]

    return run


GOOD = "models: [demo]\nrecipes: [rtn-w4a16]\ntasks: [python_quiz]\n"


def test_unknown_names_are_told_all_at_once(refused):
    message = refused(
        "models: [/no/such/folder]\nrecipes: [rtn-w4a61, fp8-dynamic]\ncalibration: [pythondocs]\n"
        "tasks: [python_docs]\npolicy: none.yaml\n"
    )
    for words in (
        "unknown recipe 'rtn-w4a61'. Did you mean rtn-w4a16",
        "unknown calibration set 'pythondocs'. Did you mean python-docs",
        "there is no folder /no/such/folder",
        "cannot read none.yaml",
    ):
        assert words in message


def test_an_unknown_task(refused):
    assert "unknown task 'python_dox'" in refused(GOOD.replace("python_quiz", "python_dox"))


def test_a_recipe_that_learns_needs_a_set(refused):
    message = refused(GOOD.replace("rtn-w4a16", "gptq-w4a16"))
    assert "recipe gptq-w4a16 needs calibration data: name sets under `calibration:`" in message


def test_more_gpus_than_this_machine_has(refused):
    message = refused(GOOD + "resources: {quantize: {gpus: 999}}\n")
    assert "resources.quantize asks for 999 GPUs, and this machine has" in message


def test_a_cycle(refused):
    models = "models: [{model: demo, name: a, after: [b]}, {model: demo, name: b, after: [a]}]\n"
    message = refused(models + "recipes: [rtn-w4a16]\n")
    assert "a comes after b comes after a: none of them can start" in message


def test_a_bucket_library_that_is_not_installed(refused):
    if importlib.util.find_spec("adlfs"):
        pytest.skip("adlfs is installed")
    assert "pip install adlfs" in refused(GOOD, out="abfs://bucket/runs")


def test_storage_that_cannot_be_opened(refused, tmp_path):
    message = refused(GOOD, out=f"zip://runs::{tmp_path}/none.zip")
    assert "none.zip" in message


def test_an_unknown_executor_and_an_address_without_ray(refused):
    assert "--on: 'slurm' is not here or ray" in refused(GOOD, "--on", "slurm", code=2)
    told = refused(GOOD, "--address", "auto", code=2)
    assert "--address is that of a Ray cluster; add --on ray" in told


def test_ray_that_is_not_installed(refused, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    assert resources.install("ray") in refused(GOOD, "--on", "ray")


@needs_ray
def test_an_address_where_no_cluster_answers(refused):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        message = refused(GOOD, "--on", "ray", "--address", address)
    assert f"no Ray cluster answers at {address}: Connection refused" in message
    assert "give HOST:PORT" in refused(GOOD, "--on", "ray", "--address", "somewhere")


def test_a_dry_run_shows_the_graph_and_writes_nothing(run_cli, tmp_path):
    path, out = tmp_path / "sweep.yaml", tmp_path / "runs"
    path.write_text(
        GOOD.replace("[rtn-w4a16]", "[rtn-w4a16, gptq-w4a16, awq-w4a16]")
        + "calibration: [{set: python-docs, samples: 8}, {set: python-docs, samples: 4}]\n"
    )
    arguments = ["sweep", "run", path, "-o", out, "--dry-run"]
    result = run_cli(arguments)
    assert result.code == 0
    assert "steps; to do: about" in result.stdout
    data = json.loads(run_cli([*arguments, "--json"]).stdout)
    kinds = [step["kind"] for step in data["steps"]]
    # One recipe without data, two with two sets each, and the source.
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "calibrate": 2, "quantize": 5, "verify": 5, "score": 6, "report": 1,
    }  # fmt: skip
    sizes = [s["size_bytes"] for s in data["steps"] if s["title"] == "demo rtn-w4a16"]
    assert sizes == [4537504, 0]
    assert all(step["seconds"] is not None for step in data["steps"])
    assert not out.exists()


def test_a_dry_run_reckons_gpu_hours_where_gpus_are_asked_for(tmp_path):
    from quantkit.sweep import cost, resolve, spec
    from quantkit.sweep.expand import Devices, expand

    wanted = spec.validated(
        {
            "models": ["demo"],
            "recipes": ["gptq-w4a16"],
            "calibration": ["python-docs"],
            "tasks": ["python_quiz"],
        },
        "here",
    )
    sweep = resolve.resolve(wanted, tmp_path)
    graph = expand(sweep, Devices("cuda", "cuda"))
    fast = cost.costs(sweep, graph)
    slow = cost.costs(resolve.resolve(wanted.model_copy(update={"gpu": "T4"}), tmp_path), graph)
    (name,) = (s.name for s in graph.of_kind("quantize"))
    assert fast.gpu == "H200"
    assert fast.steps[name].on_gpu
    assert 0 < fast.steps[name].seconds < slow.steps[name].seconds / 10


@pytest.fixture
def done(tmp_path):
    """A sweep of steps that need no model, done but for one that always fails."""
    out = tmp_path / "runs"
    steps = {t: s for t, s in sweeps.line().items() if t != "report"}
    workers = sweeps.Workers(fail=lambda step, time: step.title == "verify one")
    going, _ = sweeps.run(steps.values(), out, workers)
    listed = [
        {
            "kind": s.kind,
            "title": s.title,
            "digest": s.digest,
            "needs": s.needs,
            "after": s.after,
            "whatever": s.whatever,
            "work": {},
        }
        for s in going.graph.steps.values()
    ]
    Place(out).write(driver.SWEEP, json.dumps({"spec": {}, "steps": listed}).encode())
    return out


def test_status_tells_what_is_done_and_what_failed(run_cli, done):
    result = run_cli(["sweep", "status", done])
    assert (result.code, result.stderr) == (0, "")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["quantize"][1:4] == ["2", "of", "2"]
    assert rows["verify"][1:5] == ["1", "of", "2", "1"]
    assert "ValueError: verify one went wrong" in result.stdout
    assert f"logs/{sweeps.line()['verify one'].name}/3.log" in result.stdout
    assert "not running" in result.stdout
    data = json.loads(run_cli(["sweep", "status", done, "--json"]).stdout)
    assert (data["done"], data["driver"], data["running"]) == (False, None, {})


def test_status_says_who_drives(run_cli, done):
    from quantkit.sweep.lease import Lease

    with Lease(Place(done)):
        assert "driven by process" in run_cli(["sweep", "status", done]).stdout


def test_status_finds_what_was_tampered_with(run_cli, done):
    (file,) = done.glob("results/quantize-two-*/*/text")
    file.write_text("9(c)")
    result = run_cli(["sweep", "status", done, "--check"])
    assert result.code == 3
    assert "its digest differs" in result.stdout


def test_a_folder_without_a_sweep(run_cli, tmp_path):
    for command in ("status", "report"):
        result = run_cli(["sweep", command, tmp_path])
        assert (result.code, result.stdout) == (3, "")
        assert "holds no sweep" in result.stderr


def test_no_report_before_anything_is_done(run_cli, done):
    result = run_cli(["sweep", "report", done])
    assert (result.code, result.stdout) == (3, "")
    assert "is done yet; see `quantkit sweep status" in result.stderr


def test_a_damaged_plan(run_cli, done):
    (done / "sweep.json").write_text("{")
    result = run_cli(["sweep", "status", done])
    assert result.code == 3
    assert "sweep.json is damaged" in result.stderr


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_state(run_cli, done, content):
    (done / "state.json").write_text(content)
    for command in ("status", "report"):
        result = run_cli(["sweep", command, done])
        assert (result.code, result.stdout) == (3, "")
        assert "state.json is damaged; remove it" in result.stderr
