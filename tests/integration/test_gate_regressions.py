"""The default policy stops checkpoints that went wrong, and says what to look at first.

A quantiser that does wrong writes files and a manifest that fit each other; so damage is done to
both, and only scores can show it.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from quantkit import grid
from quantkit.calibration.reading import python_text
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.cli.main import main
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import FILE
from quantkit.formats import packing
from quantkit.gating import policy
from quantkit.gating.judge import judge
from quantkit.gating.verdict import Answer
from quantkit.model.shards import ShardWriter, TensorSpec, read_header
from quantkit.model.source import ModelSource
from quantkit.onepass import prepare
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.report import files
from quantkit.report.comparison import Report
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import ScoreOptions
from quantkit.storage import sha256_of

RECIPE = load("gptq-w4a16").model_copy(update={"options": {"sweeps": 0}})
"""Without the refinement, which is a third of the work and which no verdict needs."""
READ = [0, 1, 5, 6, 7, 9, 11, 12, 13, 15, 16, 18, 20, 21, 22, 23, 26, 27, 28, 29]
"""The shortest documents: as many as a verdict needs, in a third of the time of the first ones."""
LONGEST = 1700
"""Characters after which a document is cut: what remains is as much as a verdict needs."""
ASKED = ScoreOptions(("python_docs",), samples={"python_docs": READ})
FEW = replace(ASKED, samples={"python_docs": [1, 11, 15, 20, 21, 22, 27, 28, 29]})
"""Enough to fail what is far off; to pass takes all of the above."""
BLOCK = "model.layers.3"
LAYER = "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module", autouse=True)
def _short_documents():
    whole = python_text.heldout()
    with pytest.MonkeyPatch.context() as patch:
        short = tuple(replace(one, text=one.text[:LONGEST]) for one in whole)
        patch.setattr(python_text, "heldout", lambda: short)
        yield


@pytest.fixture(scope="module")
def source():
    return ModelSource.open("demo")


@pytest.fixture(scope="module")
def good(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("good")
    choice = CalibrationChoice("python-docs", 32, 128)
    return quantize(source, [RECIPE], out, "cpu", calibration=choice)[0]


@pytest.fixture(scope="module")
def baseline(source):
    return evaluate(source, ASKED, "cpu")


@pytest.fixture(scope="module")
def few(source):
    return evaluate(source, FEW, "cpu")


@pytest.fixture(scope="module")
def good_scored(good):
    return evaluate(good, ASKED, "cpu")


def judged(*evaluations):
    return judge(Report.of(evaluations).document, policy.default())


def damaged(checkpoint, target, change, modules):
    """A copy whose numbers `change` has altered, told of in its manifest as a quantiser would."""
    folder = shutil.copytree(checkpoint.folder, target)
    source = ModelSource.open("demo")
    scheme = checkpoint.manifest.weights_recipe.weights
    path = folder / "model.safetensors"
    stored = {name: tensor.read() for name, tensor in read_header(path).items()}
    codes = {name: tensor.dtype for name, tensor in read_header(path).items()}
    manifest = json.loads((folder / FILE).read_text())
    for module in modules:
        quantized = checkpoint.quantized_weight(module)
        quantized.values.copy_(change(quantized.values))
        packed = packing.pack(quantized.values, scheme.num_bits)
        stored[f"{module}.weight_packed"] = packed
        wanted = source.tensors[f"{module}.weight"].read().float()
        error = float((grid.dequantize(quantized, scheme) - wanted).norm() / wanted.norm())
        layer = manifest["layers"][module]
        layer["output_error"] *= (error / layer["relative_error"]) ** 2
        layer["relative_error"] = error
    path.unlink()
    specs = [TensorSpec(n, codes[n], tuple(t.shape)) for n, t in stored.items()]
    writer = ShardWriter(path, specs)
    for name, tensor in stored.items():
        writer.write(name, tensor)
    writer.close()
    manifest["files"][path.name].update(sha256=sha256_of(path), size_bytes=path.stat().st_size)
    (folder / FILE).write_text(json.dumps(manifest))
    return Checkpoint.open(folder)


def reasons(verdict):
    assert verdict.outcome is Answer.FAIL
    return "\n".join(check.reason for check in verdict.failures)


def test_a_good_checkpoint_passes(baseline, good_scored):
    verdict = judged(baseline, good_scored)
    assert verdict.outcome is Answer.PASS
    assert "calibration_ratio" in {check.metric for check in verdict.checks}


def test_one_block_in_two_bits_is_named(few, good, tmp_path):
    modules = [name for name in good.manifest.layers if name.startswith(f"{BLOCK}.")]
    two_bits = lambda values: ((values + 6) / 4.0).round().clamp(0, 3) * 4 - 6  # noqa: E731
    spoilt = damaged(good, tmp_path / "c", two_bits, modules)
    found = reasons(judged(few, evaluate(spoilt, FEW, "cpu")))
    assert "block 3 stands out" in found


def test_a_layer_of_zeros_is_named(few, good, tmp_path):
    spoilt = damaged(good, tmp_path / "c", torch.zeros_like, [LAYER])
    found = reasons(judged(few, evaluate(spoilt, FEW, "cpu")))
    assert "down_proj of block 2 stands out" in found


def test_calibration_on_noise_is_named(few, source, tmp_path, monkeypatch):
    noise = torch.randint(0, 4096, (16, 128), generator=torch.Generator().manual_seed(0))
    tokens = CalibrationTokens("noise.jsonl", noise)
    monkeypatch.setattr(prepare, "load_tokens", lambda *_: tokens)
    (made,) = quantize(
        source, [RECIPE], tmp_path, "cpu", calibration=CalibrationChoice("noise.jsonl")
    )
    found = reasons(judged(few, evaluate(made, FEW, "cpu")))
    assert "calibration_ratio is" in found
    assert "perplexity of the calibration tokens" in found
    assert "at most 100 is allowed" in found


def test_a_score_of_other_files_is_named(baseline, good, good_scored, tmp_path, capsys):
    files.write(Report.of([baseline, good_scored]), tmp_path)
    changed = damaged(good, tmp_path / RECIPE.name, lambda values: values.flip(1), [LAYER])
    report = str(tmp_path / "report.json")
    assert main(["gate", report, "--checkpoint", str(good.folder)]) == 0
    capsys.readouterr()
    assert main(["gate", report, "--checkpoint", str(changed.folder)]) == 1
    assert "changed after it was scored" in capsys.readouterr().out


@pytest.mark.slow
def test_twenty_honest_runs_pass(baseline, source, tmp_path):
    for seed in range(20):
        spec = tmp_path / f"{seed}.yaml"
        spec.write_text(
            f"sources: [{{kind: python-docs}}]\nn_samples: 32\nmax_length: 128\nseed: {seed}\n"
        )
        (made,) = quantize(
            source,
            [load(RECIPE.name)],
            tmp_path / str(seed),
            "cpu",
            calibration=CalibrationChoice(str(spec)),
        )
        assert judged(baseline, evaluate(made, ASKED, "cpu")).outcome is Answer.PASS
