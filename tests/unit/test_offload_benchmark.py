"""The program that holds predictions for layers in host memory against llama.cpp."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("offload", ROOT / "benchmarks/offload.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def predicted(program):
    return program.predict("H200", 90.0)


def test_each_quarter_of_the_layers_is_predicted_before_anything_is_measured(predicted):
    points = predicted["points"]
    assert [point["share"] for point in points] == [0, 0.25, 0.5, 0.75, 1]
    # The output layer counts as one; then a quarter of 16 layers each.
    assert [point["n_gpu_layers"] for point in points] == [1, 5, 9, 13, 999]
    rates = [point["typical"] for point in points]
    assert rates == sorted(rates)
    assert all(point["low"] < point["typical"] < point["high"] for point in points)
    # 1.97 GiB a token, nearly all of it from a host that was timed: only unpacking comes on top.
    assert rates[0] == pytest.approx(90 * 0.76 / 2.1, rel=0.05)
    assert "measured" not in json.dumps(predicted)


def test_half_of_the_layers_cost_half_of_the_hosts_time(predicted):
    none, _, half, _, everything = (1 / point["typical"] for point in predicted["points"])
    assert half == pytest.approx((none + everything) / 2, rel=0.02)


def test_shares_that_fail_are_written_down_and_the_others_still_tried(
    program, tmp_path, predicted, monkeypatch
):
    """Libraries that are not there: every share ends by itself, and says why."""
    monkeypatch.setattr(program, "host_gb_s", lambda: 12.5)
    file, before, out = (tmp_path / name for name in ("x.gguf", "before.json", "out.json"))
    file.write_bytes(b"GGUF")
    before.write_text(json.dumps(predicted | {"points": predicted["points"][:2]}))
    words = ["measure", file, before, "--libraries", tmp_path, "--out", out]
    with pytest.raises(SystemExit, match="1"):
        program.main([str(word) for word in words])
    found = json.loads(out.read_text())
    assert [point["share"] for point in found["points"]] == [0, 0.25]
    assert all("llama_library.py" in point["failed"] for point in found["points"])
    assert found["n_cores"] >= 1
    assert found["host_gb_s_when_measured"] == 12.5


def test_the_speed_of_memory_is_that_of_all_that_was_read(program, monkeypatch):
    times = iter(range(100))
    monkeypatch.setattr(program, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert program.host_gb_s(2, 16_000_000) == pytest.approx(0.016)  # each pass takes a second


def test_cores_that_others_keep_busy_are_told_and_ours_do_not_count(program, monkeypatch):
    first = program.Cores.now()
    assert all(a <= b for a, b in zip(first, program.Cores.now(), strict=True))
    # In two seconds six of processors, three of them our own, and one that was not to be had.
    seen = iter([(0.0, 10.0, 1.0, 0.0), (2.0, 16.0, 4.0, 1.0)])
    monkeypatch.setattr(program.Cores, "now", staticmethod(lambda: next(seen)))
    assert program.Cores().told() == {"others_cores": 1.5, "stolen_cores": 0.5}
