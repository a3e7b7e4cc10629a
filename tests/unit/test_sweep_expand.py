"""Digests of steps: they change with what decides a result, and with nothing else."""

import sys
from importlib import metadata

import pytest

from quantkit.errors import MethodError
from quantkit.progress import Silent
from quantkit.sweep import cost, ranks, resolve
from quantkit.sweep import graph as steps
from quantkit.sweep import spec as sweep_spec
from quantkit.sweep.expand import Devices, expand
from quantkit.sweep.graph import Graph
from quantkit.sweep.place import Place
from quantkit.sweep.spec import KINDS
from quantkit.sweep.worker import Job, execute

SET = """
summary: two texts
sources: [{kind: files, path: data/*/*.txt, weight: 1}]
n_samples: 4
max_length: 32
avoid: [asked.jsonl]
"""


@pytest.fixture
def folder(tmp_path):
    """A set of own files, found by a pattern and kept apart from what is asked."""
    for name in ("one", "two"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "text.txt").write_text(f"text {name} of some words")
    (tmp_path / "asked.jsonl").write_text('{"text": "a question"}\n')
    (tmp_path / "own.yaml").write_text(SET)
    return tmp_path


@pytest.fixture
def install(monkeypatch):
    """Pretends that a package is there in another version."""
    version = metadata.version

    def pretend(package: str, wanted: str) -> None:
        def told(name: str) -> str:
            return wanted if name == package else version(name)

        monkeypatch.setattr(metadata, "version", told)

    return pretend


def resolved(folder, *sets: str) -> resolve.Resolved:
    words = {
        "models": ["demo"],
        "recipes": ["gptq-w4a16", "rtn-w4a16"],
        "calibration": list(sets),
        "tasks": ["python_quiz"],
    }
    return resolve.resolve(sweep_spec.validated(words, "here"), folder)


def graph(folder, *sets: str) -> Graph:
    return expand(resolved(folder, *sets), Devices("cpu", "cpu"))


def names(found: Graph, *kinds: str) -> set[str]:
    return {step.name for step in found.steps.values() if not kinds or step.kind in kinds}


def test_the_same_file_is_the_same_set_from_any_working_directory(folder, monkeypatch):
    text = "data/one/text.txt"
    before = names(graph(folder, "own.yaml", text))
    monkeypatch.chdir(folder / "data")
    assert names(graph(folder, "own.yaml", text)) == before


@pytest.mark.parametrize("file", ["data/two/text.txt", "asked.jsonl"])
def test_other_data_makes_another_set_and_what_learns_from_it(folder, file):
    before = graph(folder, "own.yaml")
    path = folder / file
    path.write_text(path.read_text().replace("text", "word").replace("question", "riddle"))
    after = graph(folder, "own.yaml")
    assert not names(before, "calibrate") & names(after, "calibrate")
    same = {s.title for s in before.steps.values() if s.name in names(after)}
    assert {"demo rtn-w4a16", "demo source python_quiz"} <= same
    assert "demo gptq-w4a16 own" not in same


@pytest.mark.parametrize(
    ("package", "again", "kept"),
    [
        ("lm_eval", {"score", "report"}, {"calibrate", "quantize", "verify"}),
        ("torch", {"quantize", "verify", "score", "report"}, {"calibrate"}),
        ("tokenizers", {"calibrate"}, set()),
        ("transformers", set(KINDS), set()),
        ("rich", set(), set(KINDS)),
    ],
)
def test_another_version_does_again_what_it_decides(folder, install, package, again, kept):
    before = graph(folder, "own.yaml")
    install(package, "0.0.0")
    after = graph(folder, "own.yaml")
    assert all(names(before, kind) and names(after, kind) for kind in KINDS)
    for kind in again:
        assert not names(before, kind) & names(after, kind), kind
    for kind in kept:
        assert names(before, kind) == names(after, kind), kind


def test_another_version_of_quantkit_does_everything_again(folder, monkeypatch):
    before = graph(folder, "own.yaml")
    monkeypatch.setattr(steps, "__version__", "0.0.0")
    assert not names(before) & names(graph(folder, "own.yaml"))


def test_another_build_of_the_same_version_does_nothing_again(folder, install):
    install("torch", "2.99.0+cpu")
    before = names(graph(folder, "own.yaml"))
    install("torch", "2.99.0+cu130")
    assert names(graph(folder, "own.yaml")) == before


def test_a_machine_with_another_version_makes_nothing(tmp_path, folder, install):
    found = graph(folder, "own.yaml").of_kind("quantize")[-1]
    install("torch", "0.0.1+cpu")
    job = Job(Place(tmp_path / "out"), (found,), {}, {found.name: 1})
    outcome = execute(job, functions={"quantize": lambda *_: pytest.fail("was done")})
    assert outcome.error.startswith("this machine has torch 0.0.1, where the sweep was started")


def test_only_checkpoints_that_are_to_be_made_need_room(folder):
    sweep = resolved(folder, "own.yaml")
    steps = expand(sweep, Devices("cpu", "cpu")).of_kind("quantize")
    each = [cost.disk_bytes(sweep, [step]) for step in steps]
    assert all(size > 1 << 20 for size in each)
    assert cost.disk_bytes(sweep, steps) == sum(each)
    assert cost.disk_bytes(sweep, []) == 0


def test_a_pass_on_several_ranks_that_fails_says_why(tmp_path, monkeypatch):
    program = "print('noise'); print('quantkit: no room'); print('more'); raise SystemExit(3)"
    monkeypatch.setattr(ranks, "command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(MethodError, match=r"^the pass on 2 ranks failed: no room$"):
        ranks.quantize({}, [], tmp_path, "cpu", 2, None, Silent())
