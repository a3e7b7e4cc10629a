"""The programs that draw the frontier: sources off their grid, runs by width, shares of a mark."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import READABLE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def programs():
    """The modules `frontier`, `off_grid` and `peers`."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield [importlib.import_module(name) for name in ("frontier", "off_grid", "peers")]
    sys.path[:] = before


def test_weights_on_a_grid_are_told_from_others(programs):
    _, off_grid, _ = programs
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    groups = weight.view(-1, 32)
    low, step = groups.amin(1, keepdim=True), (groups.amax(1) - groups.amin(1))[:, None] / 15
    on_grid = (((groups - low) / step).round() * step + low).view_as(weight)
    assert off_grid.grid_error(on_grid) < 1e-6
    free = off_grid.grid_error(weight)
    assert 0.03 < free < 0.1
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(128, 64)])})
    model.layers[0].weight.data = on_grid
    found = off_grid.grid_errors(model)
    assert found["share"] < 0.1  # bfloat16 moves them a little
    model.layers[0].weight.data = weight
    assert off_grid.grid_errors(model)["share"] == pytest.approx(1, abs=0.1)


def test_a_model_is_moved_off_its_grid_without_a_change_of_its_logits(
    programs, tiny_model, tmp_path
):
    _, off_grid, _ = programs
    folder = tiny_model(**READABLE, num_attention_heads=4, num_key_value_heads=2)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"block {i} rounds its {i % 7} weights" for i in range(60)))
    args = argparse.Namespace(
        model=folder, held_out=text, out=tmp_path / "moved", length=32, windows=4, device="cpu"
    )
    record = off_grid.moved(args)
    assert record["from_the_source"]["kl_mean"] < 1e-4
    before, after = (
        off_grid.load(path, path, torch.device("cpu")).model.layers[0].mlp.down_proj.weight
        for path in (folder, args.out)
    )
    assert not torch.equal(before, after)
    assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)
    assert off_grid.moved(args) == record


def test_rows_say_what_share_of_the_mark_they_have(programs):
    frontier, _, peers = programs
    rows = [
        {"run": "autoround-200", "bits": 4, "kl_mean": 0.04, "seconds": 160.0},
        {"run": "quantkit-best", "bits": 4, "kl_mean": 0.03, "seconds": 40.0},
        {"run": "quantkit-gptq", "bits": 4, "seconds": 30.0, "error": "out of memory"},
        {"run": "quantkit-best-w3", "bits": 3, "kl_mean": 0.3, "seconds": 40.0},
    ]
    frontier.relate(rows, 4)
    assert rows[1]["share_of_kl"] == pytest.approx(0.75)
    assert rows[1]["share_of_seconds"] == 0.25
    assert "share_of_kl" not in rows[2]
    assert "share_of_kl" not in rows[3]
    out = Path("out")
    assert peers.checkpoints("quantkit-best-w3", out) == {"quantkit-best-w3": out / "best-w3a16"}
    assert peers.checkpoints("quantkit-awq-gptq", out) == {
        "quantkit-awq-gptq": out / "awq-gptq-w4a16"
    }
    assert {frontier.MARK[bits] for bits in peers.RUNS_BY_WIDTH} <= set(peers.KNOWN)


@pytest.mark.slow
def test_the_frontier_resumes_with_the_rows_it_has(programs, tiny_model, tmp_path, monkeypatch):
    frontier, _, _ = programs
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"block {i} rounds its {i % 7} weights" for i in range(60)))
    arguments = ["frontier.py", "--model", str(tiny_model(**READABLE)), "--name", "tiny"]
    arguments += ["--origin", "random", "--calibration", str(text), "--text", str(text)]
    arguments += ["--samples", "4", "--length", "32", "--max-windows", "2", "--widths", "2"]
    arguments += ["--group-size", "64", "--work", str(tmp_path / "work")]
    arguments += ["--out", str(tmp_path / "out.json"), "--runs", "quantkit-best-w2"]
    arguments += ["--commit", "test"]
    monkeypatch.setattr(sys, "argv", arguments)
    frontier.main()
    first = json.loads((tmp_path / "out.json").read_text())["models"]["tiny"]["rows"]
    assert [row["run"] for row in first] == ["quantkit-best-w2"]
    assert first[0]["error"] is None
    assert first[0]["kl_mean"] > 0
    monkeypatch.setattr(frontier, "whole", None)  # would be called for a second measurement
    frontier.main()
    assert json.loads((tmp_path / "out.json").read_text())["models"]["tiny"]["rows"] == first
