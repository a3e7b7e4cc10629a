"""The benchmarks against peers: who is timed how, on which tokens, and who scores it."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import READABLE

from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def programs():
    """The modules `peers`, `peers_speed` and `quality`."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield [importlib.import_module(name) for name in ("peers", "peers_speed", "quality")]
    sys.path[:] = before


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    lines = (f"block {i} rounds its {i % 7} weights to the nearest number" for i in range(400))
    path.write_text("\n".join(lines))
    return path


def call(run, batch, model, seconds, memory=1, error=None, warm_up=False):
    return {
        "run": run,
        "batch": batch,
        "model": model,
        "warm_up": warm_up,
        "seconds": seconds,
        "peak_device_bytes": memory,
        "error": error,
    }


def test_seconds_per_block_leave_out_what_no_block_adds(programs):
    _, speed, _ = programs
    run = "llmcompressor-gptq"
    calls = [
        call(run, 8, "blocks-1", 99.0, warm_up=True),
        call(run, 8, "blocks-1", 15.0, 3),
        call(run, 8, "blocks-3", 31.0, 4),
        call(run, 1, "blocks-1", 16.0, 2),
        call(run, 1, "blocks-3", 36.0, 2),
    ]
    eight, one = speed.marginal([f"{run}@8", f"{run}@1"], (1, 3), calls)
    assert eight["seconds_per_block"] == 8.0
    assert eight["extrapolated_seconds_of_32_blocks"] == 256.0
    assert eight["peak_device_bytes"] == [3, 4]
    assert one["seconds_per_block"] == 10.0
    assert speed.best_batches([eight, one]) == {run: 8}
    ours = speed.marginal(
        ["quantkit-gptq"],
        (2, 10),
        [call("quantkit-gptq", 8, "blocks-2", 4.0), call("quantkit-gptq", 8, "blocks-10", 12.0)],
    )
    faster = speed.times_faster([*ours, one, eight], "seconds_per_block")
    assert faster == {"quantkit-gptq against llmcompressor-gptq": 8.0}


def test_runs_that_fail_or_are_stopped_stay_in_the_table(programs):
    _, speed, _ = programs
    calls = [
        call("llmcompressor-awq", 8, "blocks-1", 1.0, error="out of memory"),
        call("autoround-200", 8, "blocks-1", 1.0),
    ]
    names = ["llmcompressor-awq", "autoround-200"]
    failed, stopped = speed.marginal(names, (1, 3), calls)
    assert (failed["error"], failed["seconds_per_block"]) == ("out of memory", None)
    assert "stopped" in stopped["error"]
    assert speed.times_faster([failed, stopped], "seconds_per_block") == {}


@pytest.mark.slow
def test_whole_commands_get_the_same_tokens_and_failures_are_kept(
    programs, tiny_model, text, tmp_path
):
    peers, speed, _ = programs
    model, work = tiny_model(**READABLE), tmp_path / "work"
    speed.build_set(model, [text], 4, 64, tmp_path / "set", {})
    row = speed.whole("quantkit-gptq", model, tmp_path / "set", 128, work, {}, 600)
    assert row["error"] is None
    (folder,) = peers.checkpoints("quantkit-gptq", work / "quantkit-gptq" / "out").values()
    theirs = peers.Call(model, tmp_path / "set", None, 128, 1, tmp_path).ids()
    used = Checkpoint.open(folder).manifest.calibration
    assert theirs.shape == (4, 64)
    assert used.digest == speed.set_record(tmp_path / "set")["digest"]
    broken = tmp_path / "site"
    broken.mkdir()
    (broken / "auto_round.py").write_text("raise ImportError('no such kernel')")
    (broken / "auto_round-0.dist-info").mkdir()
    (broken / "auto_round-0.dist-info" / "METADATA").write_text("Name: auto-round\nVersion: 0\n")
    row = speed.whole(
        "autoround-light", model, tmp_path / "set", 128, work, {"autoround": str(broken)}, 600
    )
    assert "no such kernel" in row["error"]
    assert json.loads((work / "autoround-light" / "row.json").read_text()) == row


def test_one_reader_for_all_checkpoints_reads_ours_as_we_do(programs, tiny_model, text, tmp_path):
    _, _, quality = programs
    model = tiny_model(**READABLE)
    recipes = [Recipe.load("gptq-w4a16"), Recipe.load("awq-w4a16")]
    choice = CalibrationChoice(str(text), 4, 64)
    made = quantize(ModelSource.open(str(model)), recipes, tmp_path / "out", calibration=choice)
    for checkpoint in made:
        ours = dict(checkpoint.state(torch.bfloat16))
        stored = quality.dequantized(checkpoint.folder, torch.device("cpu"))
        read = {name: tensor.to(torch.bfloat16) for name, tensor in stored}
        assert read.keys() == ours.keys()
        for name, value in ours.items():
            assert torch.equal(read[name], value), name
    assert [quality.described(c.folder)["symmetric"] for c in made] == [True, False]


def test_divergence_is_exact_over_the_whole_vocabulary(programs, tiny_model):
    _, _, quality = programs
    folder, other = tiny_model(), tiny_model()
    device = torch.device("cpu")
    source, changed = quality.load(folder, folder, device), quality.load(other, other, device)
    with torch.no_grad():
        changed.lm_head.weight += torch.randn_like(changed.lm_head.weight)
    windows = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    same = quality.compare(source, source, windows)
    assert same["kl_mean"] == same["kl_p99"] == 0.0
    assert same["top1_agreement"] == 1.0
    found = quality.compare(source, changed, windows)
    with torch.no_grad():
        p = source(windows).logits.double().log_softmax(-1)
        q = changed(windows).logits.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1).flatten()
    assert found["kl_mean"] == pytest.approx(exact.mean().item(), rel=1e-5)
    assert found["kl_p99"] == pytest.approx(exact.quantile(0.99).item(), rel=1e-5)
    loss = -q[:, :-1].gather(2, windows[:, 1:, None]).mean()
    assert found["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)
    agreement = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert found["top1_agreement"] == pytest.approx(agreement)
