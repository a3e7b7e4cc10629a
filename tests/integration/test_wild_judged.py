"""Recorded outcomes of vLLM, held against the rules of this tree without vLLM."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "benchmarks/results/wild-h200.json").read_text())
NAMES = ("FP8_DYNAMIC", "NVFP4", "missing-block", "nan-e4m3-scale")


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """Judges a record as the program does when it is called."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    spec = importlib.util.spec_from_file_location("wild_program", ROOT / "benchmarks/wild.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)

    def judge(record):
        path = tmp_path / "record.json"
        path.write_text(json.dumps(record))
        places = ["--work", str(tmp_path / "corpus"), "--out", str(tmp_path / "judged")]
        program.main(["--judge", str(path), *places])

    return judge


def test_outcomes_stay_and_predictions_are_made_again(judge, tmp_path, capsys):
    record = {**RECORDED, "checkpoints": {n: RECORDED["checkpoints"][n] for n in NAMES}}
    sound = record["checkpoints"]["FP8_DYNAMIC"]
    record["checkpoints"]["FP8_DYNAMIC"] = {**sound, "found": {"outcome": "refuses"}}
    judge(record)
    said = capsys.readouterr().out
    assert "DIFFERS FP8_DYNAMIC: foretold loads (then loads), found refuses" in said
    found = json.loads((tmp_path / "judged").read_text())
    assert {n: one["found"] for n, one in found["checkpoints"].items()} == {
        n: record["checkpoints"][n]["found"] for n in NAMES
    }
    assert (found["agree"], found["of"]) == (3, 4)
    # vLLM's Marlin takes a NaN scale for a number, which the rules did not know when it ran.
    again = found["checkpoints"]["nan-e4m3-scale"]
    assert (again["foretold_then"], again["foretold"]["verdict"]) == ("garbage", "loads")
    assert found["outcomes"] == {"of": "record.json", **RECORDED["recorded"]}


def test_a_checkpoint_that_the_corpus_lacks_is_named(judge):
    with pytest.raises(SystemExit, match=r"^record\.json: the corpus has no other$"):
        judge({**RECORDED, "checkpoints": {"other": {}}})


def test_the_judged_file_is_of_the_recorded_run():
    judged = json.loads((ROOT / "benchmarks/results/wild-h200-judged.json").read_text())
    assert judged["outcomes"] == {"of": "wild-h200.json", **RECORDED["recorded"]}
    for name, one in judged["checkpoints"].items():
        assert one["found"] == RECORDED["checkpoints"][name]["found"]
        assert one["foretold_then"] == RECORDED["checkpoints"][name]["foretold"]["verdict"]
    assert judged["checkpoints"].keys() == RECORDED["checkpoints"].keys()


@pytest.mark.parametrize("name", RECORDED["checkpoints"])
def test_every_recorded_outcome_is_what_the_corpus_expects(name):
    """The table of the corpus (tests/wild.py), the rules and vLLM say the same."""
    import wild

    consequence = wild.BROKEN[name][2] if name in wild.BROKEN else "loads"
    outcome = RECORDED["checkpoints"][name]["found"]["outcome"]
    assert outcome == ("loads" if consequence == "accuracy" else consequence)
