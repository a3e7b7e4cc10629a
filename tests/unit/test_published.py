"""Our estimates against published figures: what the page on choosing claims stays true."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/published.json").read_text())
SUMMARY = RESULTS["summary"]
OLD = ("vLLM 0.4.2", "vLLM 0.6.3")


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks/published.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_recorded_results_are_those_of_today(published):
    logs, rates = published.compared(yaml.safe_load(published.DATA.read_text(encoding="utf-8")))
    for log, recorded in zip(logs, RESULTS["memory"], strict=True):
        assert log == pytest.approx(recorded)
    for rate, recorded in zip(rates, RESULTS["speed"], strict=True):
        assert rate == pytest.approx(recorded)
    assert published.summed_up(logs, rates) == pytest.approx(SUMMARY)


def test_memory_figures_to_reach(published):
    assert SUMMARY["weights"] >= 27
    assert SUMMARY["weights_within"] < 0.014
    recent = [r for r in RESULTS["memory"] if published.version(r["vllm"]) >= published.TODAY]
    assert len({(r["model"], r["gpu"]) for r in recent}) >= 6
    assert max(abs(r["used_off"]) for r in recent) < 0.03
    assert (SUMMARY["memory_logs"], SUMMARY["memory_within_5_percent"]) == (27, 23)
    assert all(row["source"].startswith("https://") for row in RESULTS["memory"])


def test_speed_figures_to_reach():
    today = [rate for rate in RESULTS["speed"] if rate["engine"] not in OLD]
    assert all(rate["in_range"] for rate in today)
    vllm = [rate for rate in today if rate["engine"].startswith("vLLM")]
    assert max(abs(rate["off"]) for rate in vllm) < 0.19
    # Pairs of model and GPU that no constant was chosen by.
    assert len({(r["model"], r["gpu"]) for r in vllm if not r.get("seen")}) >= 6
    others = [rate for rate in today if rate not in vllm]
    assert (len(others), sum(abs(rate["off"]) <= 0.25 for rate in others)) == (31, 29)
    # llama.cpp on NVIDIA's GPUs, 3B to 70B: reading, and what each layer takes besides.
    cards = [rate for rate in others if not rate["gpu"].startswith("M")]
    assert len(cards) == 21
    assert max(abs(rate["off"]) for rate in cards) < 0.14
    assert all(rate["source"].startswith("https://") for rate in RESULTS["speed"])
