"""A whole sweep over the demo model: real passes, real scores, one report."""

import importlib.util
import json
from pathlib import Path

import pytest

from quantkit.cli.main import main
from quantkit.sweep.place import Place
from quantkit.sweep.result import load_all

pytestmark = pytest.mark.usefixtures("demo_is_short")

ROOT = Path(__file__).parents[2]
TEXT = "\n\n".join(
    f"Part {n}. A tuple of {n} items takes less room than a list of {n} items, and a loop over {n} "
    f"to {2 * n} adds them up to {3 * n * n} when every step is one."
    for n in range(2, 90)
)
RECIPE = """
summary: plain rounding, with groups of our own choice
method: rtn
weights: {num_bits: 4, strategy: group, group_size: 128}
ignore: [lm_head]
"""


def write(folder: Path, more: str = "") -> None:
    (folder / "one.txt").write_text(TEXT)
    (folder / "two.txt").write_text(TEXT.replace("tuple", "dictionary").replace("loop", "walk"))
    (folder / "own.yaml").write_text(RECIPE)
    (folder / "sweep.yaml").write_text(
        "models: [demo]\n"
        "recipes: [own.yaml, gptq-w4a16]\n"
        "calibration:\n"
        "  - {set: one.txt, samples: 4, length: 32, name: one}\n"
        "  - {set: two.txt, samples: 4, length: 32, name: two}\n"
        "tasks: [python_quiz]\n"
        "limit: 4\n"
        "max_length: 64\n" + more
    )


def run(folder: Path) -> int:
    return main(["sweep", "run", str(folder / "sweep.yaml"), "-o", str(folder / "runs"), "-q"])


def records(folder: Path):
    place = Place(folder / "runs")
    return load_all(place, place.names("results"))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    write(folder)
    assert run(folder) == 0
    return folder


def test_recipes_are_made_once_or_once_a_set_and_the_source_is_scored_once(swept):
    made = [r.title for r in records(swept).values()]
    assert sorted(made) == sorted(
        [
            "demo one", "demo two", "demo",
            *["demo own", "demo gptq-w4a16 one", "demo gptq-w4a16 two"] * 2,
            "demo source python_quiz", "demo own python_quiz",
            "demo gptq-w4a16 one python_quiz", "demo gptq-w4a16 two python_quiz",
        ]
    )  # fmt: skip


def test_one_report_tells_of_everything(swept):
    report = json.loads((swept / "runs" / "report.json").read_text())
    (model,) = report["models"]
    names = {c["name"] for c in model["report"]["candidates"]}
    assert names == {"own", "gptq-w4a16@one", "gptq-w4a16@two"}
    assert set(model["checkpoints"]) == names
    assert all(Path(path, "quantkit.json").is_file() for path in model["checkpoints"].values())
    page = (swept / "runs" / "report.html").read_text()
    assert all(name in page for name in names)
    assert (swept / "runs" / "reports" / "demo" / "report.html").is_file()


def test_the_other_set_makes_another_checkpoint(swept):
    found = {r.title: r.identity for r in records(swept).values() if r.kind == "quantize"}
    assert len(set(found.values())) == 3


def test_scores_are_those_of_a_plain_run(swept, tmp_path):
    from quantkit.model.source import ModelSource
    from quantkit.scoring.harness import evaluate
    from quantkit.scoring.options import ScoreOptions

    asked = ScoreOptions(("python_quiz",), 4, max_length=64, cache=tmp_path)
    plain = evaluate(ModelSource.open("demo"), asked, "cpu").card
    (found,) = (r for r in records(swept).values() if r.title == "demo source python_quiz")
    assert found.facts == {key: score.value for key, score in plain.scores.items()}


def test_candidates_are_held_against_their_source(tmp_path):
    """Its predictions and its own answers travel from its steps to theirs."""
    lines = ["models: [demo]", "recipes: [rtn-w4a16]", "tasks: [damage-quick]", "limit: 2"]
    (tmp_path / "sweep.yaml").write_text("\n".join(lines) + "\n")
    assert run(tmp_path) == 0
    report = json.loads((tmp_path / "runs" / "report.json").read_text())
    (candidate,) = report["models"][0]["report"]["candidates"]
    for name in (
        "python_docs/kl_mean",
        "python_answers/kl_mean",
        "python_answers/first_difference",
    ):
        assert name in candidate["scores"]


def test_nothing_runs_twice_and_a_changed_recipe_reruns_only_its_own(swept, capsys):
    before = {name: r.folder for name, r in records(swept).items()}
    assert run(swept) == 0
    assert {name: r.folder for name, r in records(swept).items()} == before
    (swept / "own.yaml").write_text(RECIPE.replace("128", "64"))
    assert run(swept) == 0
    after = {name: r for name, r in records(swept).items()}
    assert all(after[name].folder == folder for name, folder in before.items())
    assert sorted(r.title for name, r in after.items() if name not in before) == [
        "demo", "demo own", "demo own", "demo own python_quiz",
    ]  # fmt: skip
    (swept / "own.yaml").write_text(RECIPE)


def test_a_checkpoint_that_was_changed_is_made_again_the_same(swept, run_cli):
    write(swept)
    assert run(swept) == 0
    (record,) = (
        r for r in records(swept).values() if (r.kind, r.title) == ("quantize", "demo own")
        and r.step in (swept / "runs" / "sweep.json").read_text()
    )  # fmt: skip
    file = swept / "runs/results" / record.step / record.folder / "checkpoint/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run_cli(["sweep", "status", swept / "runs", "--check"]).code == 3
    result = run_cli(["sweep", "run", swept / "sweep.yaml", "-o", swept / "runs"])
    assert result.code == 0
    assert "made again: " in result.stderr
    again = records(swept)[record.step]
    assert (again.identity, again.folder != record.folder) == (record.identity, True)
    assert run_cli(["sweep", "status", swept / "runs", "--check"]).code == 0


def test_the_gate_decides_the_exit_code(swept):
    (swept / "policy.yaml").write_text("rules:\n  - python_quiz: {max_drop: 0}\n")
    write(swept, "policy: policy.yaml\n")
    code = run(swept)
    report = json.loads((swept / "runs" / "report.json").read_text())
    told = report["models"][0]["gate"]
    drops = [
        c["scores"]["python_quiz/acc"]["value"]
        < report["models"][0]["report"]["baseline"]["scores"]["python_quiz/acc"]["value"]
        for c in report["models"][0]["report"]["candidates"]
    ]
    assert (told, code) == (("fail", 1) if any(drops) else ("pass", 0))


def quantize_step(folder: Path):
    """One recipe of the demo model, as a sweep would make it."""
    from quantkit.sweep import driver
    from quantkit.sweep.expand import Devices
    from quantkit.sweep.spec import SweepSpec

    words = {"models": ["demo"], "recipes": ["rtn-w4a16"], "tasks": ["python_quiz"]}
    spec, place = SweepSpec.model_validate(words), Place(folder)
    found = driver.prepare(spec, folder, place, lambda: Devices("cpu", "cpu"))
    (step,) = found.graph.of_kind("quantize")
    return step


def test_what_a_kill_found_finished_but_not_published_is_taken_up(tmp_path, monkeypatch):
    from quantkit.sweep import work, worker

    step, place = quantize_step(tmp_path), Place(tmp_path)
    job = worker.Job(place, (step,), {}, {step.name: 1})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            worker.execute(job)
    monkeypatch.setattr(work, "quantize_model", killed)  # it is not quantised a second time
    outcome = worker.execute(job)
    assert outcome.error == ""
    (record,) = outcome.records
    assert place.sizes(f"results/{step.name}/{record.folder}", record.files) == {
        name: file.size_bytes for name, file in record.files.items()
    }


@pytest.mark.slow
def test_a_pass_under_torchrun_makes_the_same_checkpoint(swept, tmp_path):
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.progress import Silent
    from quantkit.recipe import load
    from quantkit.sweep import ranks

    model = {"place": "demo", "revision": None, "trust_remote_code": False}
    recipe = load(str(swept / "own.yaml"))
    ranks.quantize(model, [recipe], tmp_path, "cpu", 1, None, Silent())
    (here,) = (
        r for r in records(swept).values()
        if r.identity == Checkpoint.open(tmp_path / "own").digest
    )  # fmt: skip
    assert here.title == "demo own"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: quantkit-llm[ray]"
)
def test_twenty_sweeps_survive_a_killed_node_or_driver(tmp_path):
    import random

    spec = importlib.util.spec_from_file_location("kill", ROOT / "benchmarks/sweep_kill.py")
    kill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kill)
    kill.prepare(tmp_path)
    nodes, chance = kill.Nodes(), random.Random(0)
    try:
        wanted, usual = kill.undisturbed(tmp_path, nodes)
        trials = [
            kill.disturbed(tmp_path, nodes, wanted, usual, number, chance) for number in range(20)
        ]
    finally:
        nodes.close()
    assert all(trial.identical for trial in trials), trials
    assert any(trial.was_running for trial in trials)
