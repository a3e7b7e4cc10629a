"""An FP8 cache of keys and values: its scales, what they leave alone, and what finds them wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, DynamicCache

from quantkit.errors import CheckpointError, DataError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import FILE
from quantkit.model.architecture import Architecture
from quantkit.model.shards import ShardWriter, TensorSpec, read_header
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice, load_tokens
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring import loading
from quantkit.scoring.harness import score
from quantkit.storage import sha256_of
from quantkit.verification.checkpoint import verify

pytestmark = pytest.mark.usefixtures("coarse_awq")

# A file of its own: a set that has to be put together first takes longer than the pass.
FEW = CalibrationChoice(str(Path(__file__).parents[2] / "README.md"), 8, 128)
BASES = ["awq-gptq-w4a16", "fp8-block", "fp8-dynamic", "rtn-w4a16"]
CPU = torch.device("cpu")
FIRST = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def made(short_demo, tmp_path_factory):
    """Every base recipe with and without the addition, from one run."""
    names = [name for base in BASES for name in (base, f"{base}+kv-fp8")]
    recipes = [Recipe.load(name) for name in names]
    out = tmp_path_factory.mktemp("out")
    written = quantize(short_demo, recipes, out, calibration=FEW)
    return {checkpoint.label: Checkpoint.open(checkpoint.folder) for checkpoint in written}


@pytest.mark.parametrize("base", BASES)
def test_everything_else_is_written_as_without(made, base):
    plain, added = made[base].tensors, made[f"{base}+kv-fp8"].tensors
    scales = {f"model.layers.{i}.self_attn.{kind}_scale" for i in range(2) for kind in "kv"}
    assert set(added) - set(plain) == scales
    for name, tensor in plain.items():
        written = added[name].read().view(torch.uint8)
        assert torch.equal(tensor.read().view(torch.uint8), written), name


@pytest.mark.parametrize("base", BASES)
def test_it_verifies(made, base):
    result = verify(made[f"{base}+kv-fp8"].folder)
    assert result.ok, result.faults
    assert not result.left_out


def test_it_does_not_depend_on_its_neighbours(made, short_demo, tmp_path):
    for name in ("fp8-dynamic+kv-fp8", "awq-gptq-w4a16+kv-fp8"):
        (alone,) = quantize(short_demo, [Recipe.load(name)], tmp_path, calibration=FEW)
        assert alone.digest == made[name].digest


@pytest.mark.parametrize("base", ["awq-gptq-w4a16", "fp8-dynamic"])
@torch.no_grad()
def test_scales_are_the_largest_magnitudes_over_448(made, short_demo, base):
    """From the source's own cache, values divided by what was folded into their projection."""
    source, checkpoint = short_demo, made[f"{base}+kv-fp8"]
    tokens = load_tokens(source, Architecture.of(source.folder), FEW).ids
    cache = DynamicCache()
    loading.load(source, CPU)(tokens, past_key_values=cache, use_cache=True)
    fp8 = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    folded = []
    for index, layer in enumerate(cache.layers):
        name = f"model.layers.{index}.self_attn"
        values = layer.values.abs().amax((0, 2)).flatten()
        if (scale := checkpoint.scales.get(f"{name}.v_proj.out_scale")) is not None:
            folded.append(bool((values / scale).max() != values.max()))
            values = values / scale
        for kind, largest in (("k", layer.keys.abs().max()), ("v", values.max())):
            top = largest.to(torch.bfloat16).reshape(1)
            expected, _ = calculate_qparams(-top, top, fp8)
            stored = checkpoint.tensors[f"{name}.{kind}_scale"].read()
            assert stored.dtype == torch.bfloat16
            # One bf16 step, and two more where the stream sees the recipe's own block before.
            near = 0.024 if base == "awq-gptq-w4a16" and index else 0.008
            assert torch.allclose(stored.float(), expected.float(), rtol=near)
    # Which blocks fold something that moves the largest value depends on the last bit of a search.
    assert any(folded) if base == "awq-gptq-w4a16" else not folded


@pytest.mark.parametrize("base", BASES)
@torch.no_grad()
def test_scoring_rounds_as_the_reference_does(made, base):
    checkpoint = made[f"{base}+kv-fp8"]
    ids = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(0))
    reference, told = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[kind] for kind in ("unexpected_keys", "missing_keys", "mismatched_keys"))
    ours = loading.load(checkpoint, CPU)
    expected, logits = reference(ids).logits, ours(ids).logits
    assert (logits - expected).norm() / expected.norm() < 1e-6
    without = loading.load(made[base], CPU)(ids).logits
    assert 1e-3 < (logits - without).norm() / without.norm() < 0.1
    # Token by token with a real cache, and with none at all.
    cache = DynamicCache()
    steps = [
        ours(part, past_key_values=cache, use_cache=True).logits for part in ids.split([60, 4], 1)
    ]
    assert (torch.cat(steps, 1) - logits).norm() / logits.norm() < 0.02
    assert torch.equal(ours(ids, use_cache=False).logits, logits)


def test_the_score_includes_it(made):
    plain, added = (
        score(made[name], ["python_docs"], limit=2).scores["python_docs/perplexity"].value
        for name in ("fp8-dynamic", "fp8-dynamic+kv-fp8")
    )
    assert 0 < abs(added / plain - 1) < 0.02


def test_config_tells_the_engine(made):
    config = json.loads((made["rtn-w4a16+kv-fp8"].folder / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }


def test_it_needs_calibration(tmp_path):
    with pytest.raises(DataError, match=r"fp8-dynamic\+kv-fp8 .*--calibration"):
        quantize(ModelSource.open("demo"), [Recipe.load("fp8-dynamic+kv-fp8")], tmp_path)


def damaged(folder, target, change):
    """A copy with `change` made to {name: tensor}, and hashes that agree with it."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    header = read_header(path)
    tensors = {name: stored.read() for name, stored in header.items()}
    change(tensors)
    path.unlink()
    specs = [TensorSpec(n, header[n].dtype, tuple(t.shape)) for n, t in tensors.items()]
    writer = ShardWriter(path, specs)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    manifest = json.loads((target / FILE).read_text())
    size = path.stat().st_size
    manifest["files"]["model.safetensors"] = {"sha256": sha256_of(path), "size_bytes": size}
    (target / FILE).write_text(json.dumps(manifest))
    return target


@pytest.mark.parametrize("kind", ["k", "v"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda scale: None, "is missing"),
        (lambda scale: scale.repeat(2), "it must be BF16 [1]"),
        (lambda scale: scale[0].clone(), "it must be BF16 [1]"),
        (lambda scale: scale * 0, "is not finite and positive"),
        (lambda scale: -scale, "is not finite and positive"),
        (lambda scale: scale * float("nan"), "is not finite and positive"),
        (lambda scale: scale / 0, "is not finite and positive"),
    ],
    ids=["gone", "two", "no dimension", "zero", "negative", "nan", "infinite"],
)
def test_a_wrong_scale_is_found_even_with_forged_hashes(made, tmp_path, kind, change, words):
    name = f"{FIRST}.{kind}_scale"

    def swap(tensors):
        scale = change(tensors.pop(name))
        if scale is not None:
            tensors[name] = scale

    folder = damaged(made["fp8-dynamic+kv-fp8"].folder, tmp_path / "copy", swap)
    assert any(name in fault and words in fault for fault in verify(folder).faults)


def test_a_missing_scale_is_not_scored_around(made, tmp_path):
    folder = damaged(
        made["fp8-dynamic+kv-fp8"].folder, tmp_path / "copy", lambda t: t.pop(f"{FIRST}.v_scale")
    )
    with pytest.raises(CheckpointError, match=rf"lacks {FIRST}\.v_scale"):
        loading.load(Checkpoint.open(folder), CPU)


def test_a_config_that_forgets_the_cache_is_found(made, tmp_path):
    folder = shutil.copytree(made["fp8-dynamic+kv-fp8"].folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert any("quantization_config" in fault for fault in verify(folder).faults)
