"""Our estimates against published figures: what the page on choosing claims stays true."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/published.json").read_text())


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks/published.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recorded_results_are_those_of_today(published):
    for log, recorded in zip(published.LOGS, RESULTS["memory"], strict=True):
        assert published.compare_memory(log) == pytest.approx(recorded)
    for rate, recorded in zip(published.RATES, RESULTS["speed"], strict=True):
        assert published.compare_rate(rate) == pytest.approx(recorded)


def test_figures_to_reach():
    summary = RESULTS["summary"]
    assert summary["weights_within"] < 0.02
    assert summary["memory_within_5_percent"] >= summary["memory_pairs"] - 1
    assert summary["speeds_in_range"] == summary["speeds"]
    within = {
        (rate["model"], rate["gpu"])
        for rate in RESULTS["speed"]
        if abs(rate["off"]) <= 0.25 and not rate["seen"]
    }
    assert len(within) >= 6  # pairs of model and GPU that no constant was chosen by
    assert all(rate["source"].startswith("https://") for rate in RESULTS["speed"])
