"""Names that stand in files never lead out of the folder that they are used in."""

import json
from pathlib import Path

import pytest

from quantkit.cli.main import main
from quantkit.errors import CheckpointError, ScoreError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring.evaluation import Evaluation
from quantkit.specs import plain_name

PUBLISHED = Path(__file__).parents[2] / "reports/smollm2-135m/scores/gptq-w4a16.json"
LEADING_ELSEWHERE = [
    "../../escaped",
    "/escaped",
    "a/b",
    "a\\b",
    "..",
    ".",
    "",
    "a\0b",
    "a\nb",
    "x" * 201,
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("deep") / "er" / "out"
    (checkpoint,) = quantize(ModelSource.open("demo"), [Recipe.load("rtn-w8a16")], out, "cpu")
    return checkpoint.folder


@pytest.mark.parametrize("name", LEADING_ELSEWHERE, ids=repr)
def test_names_that_are_none(name):
    with pytest.raises(ValueError, match="cannot be a file's name"):
        plain_name(name)


@pytest.mark.parametrize("name", ["gptq-w4a16", "awq+kv-fp8", "Llama 3 (8B)", "größe", ".hidden"])
def test_names_that_are_some(name):
    assert plain_name(name) == name


@pytest.mark.parametrize("name", LEADING_ELSEWHERE, ids=repr)
def test_a_manifest_cannot_name_another_place(tmp_path, made, name):
    path = made / "quantkit.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | {"name": name}))
        with pytest.raises(CheckpointError, match="name"):
            Checkpoint.open(made)
        out = tmp_path / "a" / "scores"
        arguments = ["score", str(made), "--tasks", "python_docs", "--limit", "1", "-o", str(out)]
        assert main([*arguments, "--cache", str(tmp_path / "cache"), "-q"]) == 3
    finally:
        path.write_text(before)
    assert not list(tmp_path.rglob("*escaped*"))
    assert not out.exists()


def test_a_score_file_cannot_name_another_place(tmp_path):
    card = json.loads(PUBLISHED.read_text())
    (tmp_path / "x.json").write_text(json.dumps(card | {"name": "../../escaped"}))
    with pytest.raises(ScoreError, match="cannot be a file's name"):
        Evaluation.read(tmp_path / "x.json")


@pytest.mark.parametrize("name", LEADING_ELSEWHERE, ids=repr)
def test_a_manifest_cannot_list_files_elsewhere(made, name):
    path = made / "quantkit.json"
    before = path.read_text()
    try:
        data = json.loads(before)
        data["files"][f"{name}.gguf" if name == "../../escaped" else name] = {
            "sha256": "",
            "size_bytes": 0,
        }
        path.write_text(json.dumps(data))
        with pytest.raises(CheckpointError, match="cannot be a file's name"):
            Checkpoint.open(made)
    finally:
        path.write_text(before)


def test_a_report_cannot_name_another_place(tmp_path):
    from quantkit.report import document

    published = PUBLISHED.parents[1] / "report.json"
    data = json.loads(published.read_text())
    assert document.read(published).candidates
    data["candidates"][0]["name"] = "../../escaped"
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(ScoreError, match="cannot be a file's name"):
        document.read(tmp_path / "report.json")


@pytest.mark.parametrize("change", [{"title": "../../escaped"}, {"digest": "/../../../.."}])
def test_a_sweeps_plan_cannot_name_another_place(tmp_path, change):
    from quantkit.errors import StorageError
    from quantkit.sweep.driver import SWEEP, read_plan
    from quantkit.sweep.place import Place

    step = {"kind": "report", "title": "demo", "work": {}, "digest": "0" * 64, "needs": []}
    step |= {"whatever": False, "after": []}
    (tmp_path / SWEEP).write_text(json.dumps({"steps": [step], "spec": {}}))
    assert read_plan(Place(tmp_path))
    (tmp_path / SWEEP).write_text(json.dumps({"steps": [step | change], "spec": {}}))
    with pytest.raises(StorageError, match="damaged"):
        read_plan(Place(tmp_path))


@pytest.mark.parametrize(
    "change", [{"folder": "../../escaped"}, {"step": ".."}, {"files": {"../x": {}}}]
)
def test_a_sweeps_record_cannot_name_another_place(change):
    from quantkit.sweep.result import _parsed

    record = {
        "step": "score-demo-0123",
        "kind": "score",
        "title": "demo",
        "digest": "0",
        "inputs": {},
        "identity": "0",
        "folder": "0123",
        "files": {"checkpoint/model.safetensors": {"sha256": "0", "size_bytes": 1}},
        "seconds": 1.0,
    }
    assert _parsed(json.dumps(record).encode()) is not None
    if "files" in change:
        change = {"files": {"../x": {"sha256": "0", "size_bytes": 1}}}
    assert _parsed(json.dumps(record | change).encode()) is None
