"""Claims against other quantisers rest on results where all were measured the same way."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = {"quantkit", "llmcompressor", "autoround"}
QUANTISERS = {
    "quantkit-gptq", "quantkit-awq", "quantkit-awq-gptq", "llmcompressor-gptq",
    "llmcompressor-awq", "autoround-200",
}  # fmt: skip
MEASURED = ("perplexity", "kl_mean", "top1_agreement", "peak_device_bytes")


def result(name):
    path = RESULTS / f"{name}.json"
    assert path.is_file(), f"claims against peers have no result file {path.name}"
    return json.loads(path.read_text())


def package_of(run):
    return run.partition("-")[0]


def test_seconds_per_block_come_from_two_block_counts_of_every_quantiser():
    blocks = result("peers_speed-h200")["blocks"]
    found = set()
    for row in blocks["rows"]:
        assert row["error"] is None, row["run"]
        few, many = row["block_counts"]
        assert few < many, row["run"]
        seconds = (row["seconds"][1] - row["seconds"][0]) / (many - few)
        assert row["seconds_per_block"] == pytest.approx(seconds), row["run"]
        assert all(row["peak_device_bytes"]), row["run"]
        found.add(package_of(row["run"]))
    assert found == PACKAGES


@pytest.mark.parametrize("part", ["blocks", "whole"])
def test_times_faster_divide_the_same_measure_of_both(part):
    measured = result("peers_speed-h200")[part]
    key = "seconds_per_block" if part == "blocks" else "seconds"
    fastest = {}
    for row in measured["rows"]:
        fastest[row["run"]] = min(row[key], fastest.get(row["run"], float("inf")))
    assert measured["times_faster"]
    for pair, times in measured["times_faster"].items():
        own, peer = pair.split(" against ")
        assert times == pytest.approx(fastest[peer] / fastest[own]), pair


def test_every_quantiser_was_scored_on_both_models():
    measured = result("quality-h200")
    assert len(measured["models"]) == 2
    for name, model in measured["models"].items():
        rows = {row["run"]: row for row in model["rows"]}
        assert set(rows) >= QUANTISERS, name
        assert "dequantised from a 4-bit" in model["origin"], name
        assert model["tokens"]["digest"], name
        assert model["source"]["kl_mean"] == 0, name
        for run in QUANTISERS:
            assert rows[run]["error"] is None, (name, run)
            assert all(rows[run][key] is not None for key in MEASURED), (name, run)
            assert rows[run]["seconds"] > 0, (name, run)
        assert len({rows[run]["group_size"] for run in QUANTISERS}) == 1, name


def test_the_readme_names_what_quality_rests_on():
    """Three digits of every figure in its rows stand in the result."""
    readme = (ROOT / "README.md").read_text()
    measured = result("quality-h200")
    for model in measured["models"].values():
        shown = [row["kl_mean"] for row in model["rows"] if row["run"] in QUANTISERS]
        assert any(f"{value:.3f}".lstrip("0") in readme for value in shown)
