"""Digests of steps: they change with what decides a result, and with nothing else."""

import sys

import pytest

from quantkit.errors import MethodError
from quantkit.progress import Silent
from quantkit.score import lmeval
from quantkit.sweep import cost, ranks, resolve
from quantkit.sweep import spec as sweep_spec
from quantkit.sweep.expand import Devices, expand
from quantkit.sweep.graph import Graph

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


def test_another_lm_eval_scores_again_and_quantises_nothing_again(folder, monkeypatch):
    before = graph(folder, "own.yaml")
    monkeypatch.setattr(lmeval, "version", lambda: "0.0.0")
    after = graph(folder, "own.yaml")
    assert not names(before, "score", "report") & names(after, "score", "report")
    others = ("calibrate", "quantize", "verify")
    assert names(before, *others) == names(after, *others)


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
