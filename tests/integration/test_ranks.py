"""A pass that several processes share: the same numbers as alone, and a clean end when one dies."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ranks as helper
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import READABLE, save_llama

from quantkit import formats, grid, launch, resources
from quantkit.errors import HardwareError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.shards import read_header
from quantkit.onepass.distributed import joined
from quantkit.onepass.lifeline import Lifeline
from quantkit.onepass.ranks import Ranks, assign
from quantkit.verification.checkpoint import verify

NAMES = ["gptq-w4a16", "awq-gptq-w4a16+kv-fp8", "awq-w4a16", "fp8-static", "fp8-dynamic"]
DIFFERS = {"device", "seconds", "stage_seconds", "peak_host_bytes", "created", "files", "layers"}


def dequantised(folder):
    """All weights of a checkpoint as the numbers that they stand for, by name."""
    record = Checkpoint.open(folder).manifest
    recipe = record.weights_recipe
    stored = read_header(folder / "model.safetensors")
    found = {}
    for name in record.layers:
        parts = {key: t.read() for key, t in stored.items() if key.startswith(f"{name}.")}
        found[name] = grid.dequantize(formats.unpack(name, parts, recipe), recipe.weights)
    return found


def manifest(folder):
    return json.loads((folder / "quantkit.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "model"
    save_llama(folder, **READABLE)
    words = (resources.DEMO_MODEL / "README.md").read_text().split()
    chance = random.Random(0)
    (folder.parent / "text.txt").write_text(" ".join(chance.choices(words, k=4000)))
    return folder


@pytest.fixture(scope="module")
def text(model):
    return model.parent / "text.txt"


@pytest.fixture(scope="module")
def alone(model, text):
    out = model.parent / "alone"
    return out, helper.quantize(None, model, text, out, NAMES)


@pytest.fixture(scope="module")
def two(model, text):
    out = model.parent / "two"
    digests, nothing = helper.run(2, helper.quantize, model, text, out, NAMES)
    assert nothing == {}
    return out, digests


def test_one_rank_writes_what_a_plain_run_writes(alone, model, text, tmp_path):
    names = ["gptq-w4a16", "awq-w4a16", "fp8-static"]
    (made,) = helper.run(1, helper.quantize, model, text, tmp_path, names)
    assert made == {name: alone[1][name] for name in names}


def test_the_same_bytes_from_run_to_run(two, model, text, tmp_path):
    names = NAMES[1:3]
    again, _ = helper.run(2, helper.quantize, model, text, tmp_path, names)
    assert again == {name: two[1][name] for name in names}


def like(one, other):
    """Whether two checkpoints tell nearly the same of themselves.

    A number that falls to the other side moves all that GPTQ rounds after it, so that single
    layers differ by some percent, in one process too when its batches are others.
    """
    first, second = manifest(one), manifest(other)
    same = first.keys() - DIFFERS - {"calibration"}
    assert {k: first[k] for k in same} == {k: second[k] for k in same}
    if first["calibration"]:
        was, now = first["calibration"].pop("perplexity"), second["calibration"].pop("perplexity")
        assert was == pytest.approx(now, rel=1e-4)
    assert first["calibration"] == second["calibration"]
    assert first["layers"].keys() == second["layers"].keys()
    for key in ("relative_error", "output_error"):
        was, now = ([f[key] or 0.0 for f in m["layers"].values()] for m in (first, second))
        assert now == pytest.approx(was, rel=0.25)
        assert sum(now) == pytest.approx(sum(was), rel=0.02)
    assert verify(other).ok


@pytest.mark.parametrize(("n_ranks", "n_samples"), [(2, 9), (3, 2)])
def test_statistics_of_all_ranks_are_those_of_one(model, n_ranks, n_samples):
    expected = helper.observe(None, model, n_samples)
    for found in helper.run(n_ranks, helper.observe, model, n_samples):
        assert len(found) == len(expected) == 8
        for ours, theirs in zip(expected, found, strict=True):
            for key in ("members", "n_tokens", "feeder"):
                assert theirs[key] == ours[key]
            assert theirs["keys"] == pytest.approx(ours["keys"], rel=1e-4)
            for key in ("gram", "total", "max_abs", "samples"):
                gap = np.linalg.norm(theirs[key] - ours[key])
                assert gap <= 1e-5 * np.linalg.norm(ours[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one_up_to_the_rounding_of_sums(alone, two, name):
    like(alone[0] / name, two[0] / name)


@pytest.mark.parametrize("name", ["awq-w4a16", "fp8-static", "fp8-dynamic"])
def test_numbers_that_do_not_build_on_each_other_are_nearly_the_same(alone, two, name):
    ours, theirs = (dequantised(out / name) for out in (alone[0], two[0]))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert (tensor - theirs[key]).norm() <= 0.01 * tensor.norm(), key


def test_what_needs_no_data_is_the_same_to_the_byte(alone, two):
    assert alone[1]["fp8-dynamic"] == two[1]["fp8-dynamic"]


def test_three_ranks(alone, model, text, tmp_path):
    names = ["gptq-w4a16", "fp8-static"]
    helper.run(3, helper.quantize, model, text, tmp_path, names)
    for name in names:
        like(alone[0] / name, tmp_path / name)


def test_more_ranks_than_samples(model, text, tmp_path):
    names = ["awq-w4a16"]
    helper.quantize(None, model, text, tmp_path / "alone", names, 2)
    helper.run(3, helper.quantize, model, text, tmp_path / "three", names, 2)
    like(tmp_path / "alone" / names[0], tmp_path / "three" / names[0])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_and_one_goes_on(two, model, text, tmp_path, victim):
    names = ["gptq-w4a16", "awq-w4a16"]
    results, *processes = helper.start(
        2, helper.quantize, model, text, tmp_path, names, 8, (victim, 1)
    )
    rank, said = results.get(timeout=120)
    started = time.monotonic()
    codes = helper.end(processes, 20)
    assert time.monotonic() - started < 10
    assert codes[victim] == -9
    assert (rank, codes[1 - victim]) == (1 - victim, 3)
    assert f"RankLost: rank {victim} ended early" in said
    assert "reported: False" in said  # nobody else is left to say it
    # A killed writer cannot remove its lock, which nobody holds any more.
    kept = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert kept == [f".{name}.partial" for name in sorted(names)]
    assert list(tmp_path.glob(".*/journal/00000.json"))
    assert not list(tmp_path.glob(".*/journal/00001.json"))
    helper.quantize(None, model, text, tmp_path, names)
    for name in names:
        like(two[0] / name, tmp_path / name)


def test_a_failure_is_said_once_and_everywhere_known():
    results, *processes = helper.start(3, helper.faulty)
    found = dict(results.get(timeout=120) for _ in processes)
    assert helper.end(processes, 20) == [3, 3, 3]
    assert found[0] == "RankLost: rank 1: this tensor is no good (reported: False)"
    assert found[1] == "MethodError: this tensor is no good (reported: True)"
    assert found[2] == "RankLost: rank 1: this tensor is no good (reported: True)"


def test_others_are_told_before_the_first_rank_acts_on_the_news(monkeypatch):
    """It closes the line then, and they would only hear that it is gone."""
    line, told = Lifeline(0, 3), []
    monkeypatch.setattr(line, "_say", lambda words: told.append((words, line.lost)))
    for sentence in ("rank 1: this tensor is no good", "rank 2 ended"):
        line._learn(sentence)
    assert told == [("failed rank 1: this tensor is no good", None)]
    assert line.lost == "rank 1: this tensor is no good"


def test_one_that_does_not_answer_is_not_waited_for_for_ever():
    results, *processes = helper.start(2, helper.slow)
    rank, said = results.get(timeout=120)
    helper.end(processes, 20)
    assert rank == 0
    assert "rank 0 waited" in said


def test_what_is_shared_summed_and_spread_is_the_same_everywhere():
    found = helper.run(2, helper.shared)
    assert found[0] == found[1]
    state, total, largest, samples, taken = found[0]
    assert state["numbers"] == [0, 2, 4, 6, 8]
    assert state["small"] == 0.5
    assert state["fp8"] == [[1, 1]] * 3
    assert state["none"] == []
    assert state["turned"] == [[0, 3], [1, 4], [2, 5]]
    assert state["words"] == ["rank", 1]
    assert (total, largest) == ([1, 1, 1], [1, float("inf")])
    assert samples == [0, 1, 2, 3, 4]
    assert taken == [(1, 1), (5, 0), (2, 1), (2, 1)]


def test_a_process_alone_has_nothing_to_wait_for():
    ranks, taken = Ranks(), []
    assert ranks.share("mine") == "mine"
    assert ranks.first_samples(2, lambda n: torch.arange(5)[:n]).tolist() == [0, 1]
    ranks.spread([])
    assert (ranks.is_first, taken) == (True, [])


@given(st.lists(st.floats(0, 1e6), max_size=40), st.integers(1, 9))
def test_jobs_are_spread_so_that_no_rank_has_much_more_than_its_part(costs, n_ranks):
    owners = assign(costs, n_ranks)
    assert len(owners) == len(costs)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(n_ranks)]
    fair = sum(costs) / n_ranks + max(costs, default=0.0)
    assert max(loads) <= fair * (1 + 1e-9)
    assert assign(costs, n_ranks) == owners


def torchrun(*arguments, n_ranks=2):
    return subprocess.run(
        [
            # Standalone: a port of its own, whoever else runs something on this machine.
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(n_ranks)),
            *("-m", "quantkit", *(str(argument) for argument in arguments)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_cannot_be_shared_is_told_once_a_machine(rank):
    place = launch.Place(rank, 2, rank, 2)
    with pytest.raises(HardwareError, match="is one GPU, and 2 ranks need one each") as caught:
        joined(place, "cuda:0").__enter__()
    assert caught.value.is_reported == (rank == 1)


def test_torchrun_says_a_fault_of_the_input_once(model, tmp_path):
    """The first rank finds it while preparing; the other waits, and ends in silence."""
    done = torchrun("quantize", model, "-r", "gptq-w4a16", "--device", "cpu", "-o", tmp_path / "o")
    assert done.returncode != 0
    said = [line for line in done.stderr.split("\n") if line.startswith("quantkit:")]
    assert len(said) == 1
    assert "recipe gptq-w4a16 needs calibration data: give --calibration" in said[0]
    assert not (tmp_path / "o").exists()


@pytest.mark.slow
def test_torchrun_makes_what_the_function_makes(two, model, text, tmp_path):
    names = [part for name in NAMES for part in ("-r", name)]
    how = ["--calibration", text, "--samples", 8, "--length", 64, "--device", "cpu", "--json"]
    done = torchrun("quantize", model, *names, *how, "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)  # of one rank only
    assert [Checkpoint.open(Path(m["path"])).digest for m in made] == list(two[1].values())
    assert done.stderr.count("calibration: 8 samples") == 1
