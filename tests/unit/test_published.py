"""What `recommend` says, against what others measured: figures and sources in benchmarks/."""

import sys
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import published

DATA = yaml.safe_load(published.DATA.read_text(encoding="utf-8"))
LOGS = [
    published.compare_memory({**row, "vllm": page["vllm"]}, DATA["models"])
    for page in DATA["memory"]
    for row in page["rows"]
]
RATES = [
    published.compare_rate(rate, DATA["models"])
    for page in DATA["speed"]
    for rate in published.rates_of(page)
]


def named(entry):
    return " ".join(str(entry[k]) for k in ("model", "gpu", "count", "format") if k in entry)


@pytest.mark.parametrize("log", LOGS, ids=named)
def test_weights_are_those_that_vllm_loads(log):
    assert abs(log.get("weights_off", 0)) < 0.02


@pytest.mark.parametrize(
    "log",
    [log for log in LOGS if published.version(log["vllm"]) >= published.TODAY],
    ids=named,
)
def test_memory_is_what_vllm_takes(log):
    assert abs(log["used_off"]) < published.MEMORY_WITHIN


@pytest.mark.parametrize(
    "rate", [r for r in RATES if r["engine"] not in ("vLLM 0.4.2", "vLLM 0.6.3")], ids=named
)
def test_speed_lies_between_our_ends(rate):
    assert rate["in_range"]
    if rate["engine"].startswith("vLLM"):
        assert abs(rate["off"]) < published.SPEED_WITHIN


def test_there_are_enough_to_judge_by():
    summary = published.summed_up(LOGS, RATES)
    assert summary["memory_pairs_since_0_15"] >= 6
    assert summary["speed_pairs_of_vllm_since_0_10"] >= 6
    assert all(page["source"].startswith("https://") for page in DATA["memory"] + DATA["speed"])
