"""Checkpoints in the older formats, read by plain loops that know nothing of our code."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stopping import FULL, stopping_at

from quantkit.conversion import convert
from quantkit.errors import CheckpointError, StorageError
from quantkit.export.checkpoint import Checkpoint
from quantkit.formats import awq, gptq
from quantkit.grid import QuantizedWeight
from quantkit.model.shards import as_bytes
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring import loading
from quantkit.verification.checkpoint import verify

pytestmark = pytest.mark.usefixtures("coarse_awq")

DATA = CalibrationChoice("python-docs", 4, 64)
LAYER = "model.layers.1.self_attn.o_proj"
CPU = torch.device("cpu")
BLOCKS = {"num_key_value_heads": 4, "vocab_size": 4096}  # every layer divides by 128


def recipe(name="own", **weights):
    return Recipe(name=name, summary="own", method="rtn", weights=weights)


def make(model, out, *recipes, calibration=None):
    """Checkpoints of recipes, or of `name format` texts."""
    loaded = []
    for one in recipes:
        if isinstance(one, str):
            name, _, format = one.partition(" ")
            one = Recipe.load(name).in_format(format or "compressed-tensors")
        loaded.append(one)
    return quantize(ModelSource.open(str(model)), loaded, out, calibration=calibration)


def words_of(packed, bits):
    """The unsigned fields of every word, lowest bits first."""
    words = packed.numpy().astype(np.int64) & 0xFFFFFFFF
    fields = np.zeros((*words.shape, 32 // bits), dtype=np.int64)
    for place in range(32 // bits):
        fields[..., place] = (words >> (bits * place)) % (1 << bits)
    return fields


def read_gptq(stored, bits):
    """Integers [rows, columns], zero points and scales [rows, groups], by AutoGPTQ's rules."""
    weights, zeros = words_of(stored["qweight"], bits), words_of(stored["qzeros"], bits)
    n_words, rows, per_word = weights.shape
    columns = n_words * per_word
    groups = stored["g_idx"].tolist()
    integers = np.zeros((rows, columns), dtype=np.int64)
    for column in range(columns):
        for row in range(rows):
            integers[row, column] = weights[column // per_word, row, column % per_word]
    points = np.zeros((rows, max(groups) + 1), dtype=np.int64)
    for group in range(max(groups) + 1):
        for row in range(rows):
            points[row, group] = zeros[group, row // per_word, row % per_word] + 1
    return integers, points, stored["scales"].float().numpy().T, groups


def read_awq(stored):
    """The same by AutoAWQ's rules."""
    places = [0, 2, 4, 6, 1, 3, 5, 7]  # the row of eight that lies in each field
    weights, zeros = words_of(stored["qweight"], 4), words_of(stored["qzeros"], 4)
    columns, n_words, _ = weights.shape
    integers = np.zeros((n_words * 8, columns), dtype=np.int64)
    points = np.zeros((n_words * 8, zeros.shape[0]), dtype=np.int64)
    for word in range(n_words):
        for field, place in enumerate(places):
            for column in range(columns):
                integers[8 * word + place, column] = weights[column, word, field]
            for group in range(zeros.shape[0]):
                points[8 * word + place, group] = zeros[group, word, field]
    return integers, points, stored["scales"].float().numpy().T


def parts(checkpoint, module=LAYER):
    names = [n for n in checkpoint.tensors if n.startswith(f"{module}.")]
    return {n.removeprefix(f"{module}."): checkpoint.tensors[n].read() for n in names}


def tensors(folder):
    found = Checkpoint.open(folder).tensors
    return {n: (t.dtype, t.shape, bytes(as_bytes(t.read()))) for n, t in found.items()}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_gptq_is_what_autogptq_wrote(tiny_model, tmp_path, bits, group_size):
    scheme = {"strategy": "channel"} if group_size == -1 else {"group_size": group_size}
    usual = recipe(num_bits=bits, **scheme)
    ours, theirs = make(tiny_model(), tmp_path / "out", usual, usual.in_format("gptq"))
    known = ours.quantized_weight(LAYER)
    integers, zeros, scales, groups = read_gptq(parts(theirs), bits)
    middle = 1 << (bits - 1)
    assert (integers - middle == known.values.numpy()).all()
    assert (zeros == middle).all()
    assert (scales == known.scale.float().numpy()).all()
    assert groups == [column // (group_size % 129) for column in range(128)]
    assert theirs.tensors[f"{LAYER}.scales"].dtype == "BF16"  # the model's own
    config = json.loads((theirs.folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"]) == ("gptq", bits)
    assert (config["group_size"], config["sym"], config["desc_act"]) == (group_size, True, False)
    assert verify(theirs.folder).ok


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq_is_what_autoawq_wrote(tiny_model, tmp_path, symmetric):
    usual = recipe(num_bits=4, group_size=64, symmetric=symmetric)
    ours, theirs = make(tiny_model(), tmp_path / "out", usual, usual.in_format("awq"))
    known = ours.quantized_weight(LAYER)
    integers, zeros, scales = read_awq(parts(theirs))
    assert (integers - 8 == known.values.numpy()).all()
    assert (zeros - 8 == (0 if symmetric else known.zero_point.numpy())).all()
    assert (scales == known.scale.float().numpy()).all()
    assert theirs.tensors[f"{LAYER}.scales"].dtype == "F16"
    config = json.loads((theirs.folder / "config.json").read_text())["quantization_config"]
    assert config == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert verify(theirs.folder).ok


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1), st.sampled_from([4, 8]))
@settings(max_examples=25)
def test_any_numbers_survive_packing(eights, groups, seed, bits):
    half = 1 << (bits - 1)
    draw = torch.Generator().manual_seed(seed)
    rows, columns = 8 * eights, 32 * groups

    def integers(*shape):
        return torch.randint(-half, half, shape, generator=draw).to(torch.int8)

    scale = torch.rand(rows, groups, generator=draw).half() + 0.1
    weight = QuantizedWeight(integers(rows, columns), scale, None)
    made = gptq.pack("a", weight, recipe(num_bits=bits, group_size=32))
    found, zeros, scales, _ = read_gptq({n[2:]: t for n, t in made.items()}, bits)
    assert (found - half == weight.values.numpy()).all()
    assert (zeros == half).all()
    assert (scales == scale.float().numpy()).all()
    if bits == 4:
        pointed = QuantizedWeight(weight.values, scale, integers(rows, groups))
        made = awq.pack("a", pointed, recipe(num_bits=4, group_size=32, symmetric=False))
        found, zeros, scales = read_awq({n[2:]: t for n, t in made.items()})
        assert (found - 8 == pointed.values.numpy()).all()
        assert (zeros - 8 == pointed.zero_point.numpy()).all()
        assert (scales == scale.float().numpy()).all()


PAIRS = [
    ("rtn-w4a16", "gptq"), ("rtn-w4a16", "awq"), ("rtn-w8a16", "gptq"), ("gptq-w4a16", "gptq"),
    ("awq-w4a16", "awq"), ("awq-gptq-w4a16", "gptq"), ("fp8-tensor", "fp8"), ("fp8-block", "fp8"),
    ("fp8-static+kv-fp8", "fp8"),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, _originals):
    """Recipes in both of their formats, all from one run."""
    folder = tmp_path_factory.mktemp("formats")
    names = list(dict.fromkeys(name for name, _ in PAIRS))
    model = _originals("300KB", False, "bf16", BLOCKS)
    make(model, folder, *names, *(f"{n} {f}" for n, f in PAIRS), calibration=DATA)
    return folder


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_converting_gives_what_quantising_gives(checkpoints, tmp_path, name, format):
    there = convert(checkpoints / name, format, tmp_path / "there")
    direct = Checkpoint.open(checkpoints / f"{name}-{format}")
    assert there.manifest.files == direct.manifest.files
    assert there.manifest.name == direct.manifest.name
    assert there.manifest.layers == direct.manifest.layers
    back = convert(tmp_path / "there", "compressed-tensors", tmp_path / "back")
    original = Checkpoint.open(checkpoints / name)
    assert tensors(back.folder) == tensors(original.folder)
    assert back.manifest.files == original.manifest.files
    assert back.manifest.recipe == original.manifest.recipe
    origin = there.manifest.converted_from
    assert (origin.name, origin.format) == (name, "compressed-tensors")
    assert origin.digest == original.manifest.digest
    for folder in (there.folder, direct.folder, back.folder):
        result = verify(folder)
        assert result.ok, result.faults
        assert not result.left_out


@pytest.mark.parametrize(("name", "format"), PAIRS)
def test_every_format_computes_the_same(checkpoints, name, format):
    """Weights, rounded activations and rounded caches alike."""
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        logits = [
            loading.load(Checkpoint.open(checkpoints / folder), CPU)(ids).logits
            for folder in (name, f"{name}-{format}")
        ]
    assert torch.equal(*logits)


def test_one_format_becomes_another_without_a_step_between(checkpoints, tmp_path):
    made = convert(checkpoints / "rtn-w4a16-gptq", "awq", tmp_path / "awq")
    assert made.manifest.files == Checkpoint.open(checkpoints / "rtn-w4a16-awq").manifest.files


def test_transformers_reads_fp8_blocks(checkpoints):
    from transformers import AutoModelForCausalLM

    checkpoint = Checkpoint.open(checkpoints / "fp8-block-fp8")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.bfloat16)
    theirs = model.get_submodule(LAYER).weight
    assert torch.equal(theirs, checkpoint.weight(LAYER).bfloat16())


def test_fused_layers_share_one_scale_without_data(checkpoints):
    checkpoint = Checkpoint.open(checkpoints / "fp8-tensor-fp8")
    source = ModelSource.open(checkpoint.manifest.source.name)
    for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        modules = [f"model.layers.0.{block}.{name}_proj" for name in names]
        stored = [checkpoint.tensors[f"{module}.weight_scale"] for module in modules]
        assert {(t.dtype, t.shape) for t in stored} == {("F32", ())}
        largest = max(source.tensors[f"{m}.weight"].read().abs().max() for m in modules)
        assert {t.read().item() for t in stored} == {(largest / 448).item()}


def test_native_fp8_names_and_types(checkpoints):
    static = Checkpoint.open(checkpoints / "fp8-static+kv-fp8-fp8")
    found = {n: (t.dtype, t.shape) for n, t in static.tensors.items() if LAYER in n}
    assert found == {
        f"{LAYER}.weight": ("F8_E4M3", (128, 128)),
        f"{LAYER}.weight_scale": ("F32", ()),
        f"{LAYER}.input_scale": ("F32", ()),
    }
    assert "model.layers.1.self_attn.k_scale" in static.tensors
    block = Checkpoint.open(checkpoints / "fp8-block-fp8")
    assert block.tensors[f"{LAYER}.weight_scale_inv"].dtype == "F32"
    configs = [
        json.loads((c.folder / "config.json").read_text())["quantization_config"]
        for c in (static, block)
    ]
    assert [c["activation_scheme"] for c in configs] == ["static", "dynamic"]
    assert [c["weight_block_size"] for c in configs] == [None, [128, 128]]
    assert all(c["ignored_layers"] == ["lm_head"] for c in configs)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_awq_rounds_to_scales_that_float16_holds(tiny_model, tmp_path, dtype):
    """Weights near nothing have scales that it does not; converting would lose, quantising not."""
    from safetensors.torch import load_file, save_file

    model = tiny_model(dtype=dtype)
    state = load_file(model / "model.safetensors")
    state[f"{LAYER}.weight"][:8] *= 1e-6
    save_file(state, model / "model.safetensors", {"format": "pt"})
    usual = recipe(num_bits=4, group_size=64, symmetric=False)
    ours, theirs = make(model, tmp_path / "out", usual, usual.in_format("awq"))
    result = verify(theirs.folder)
    assert result.ok, result.faults
    change = (theirs.weight(LAYER) - ours.weight(LAYER)).abs()
    assert change[:8].max() < 1e-6
    assert change[8:].max() <= (0 if dtype == "bf16" else 0.02)
    with pytest.raises(CheckpointError, match="scales that awq cannot hold exactly; call quantkit"):
        convert(ours.folder, "awq", tmp_path / "awq")
    assert not (tmp_path / "awq").exists()


def test_a_stopped_run_goes_on_in_its_format(tiny_model, tmp_path):
    """Finished blocks are replayed from what was written, whatever the format."""
    model = tiny_model(vocab_size=4096, num_hidden_layers=3)
    names = ("gptq-w4a16 gptq", "awq-gptq-w4a16 awq")
    whole = make(model, tmp_path / "whole", *names, calibration=DATA)
    with stopping_at(2, FULL), pytest.raises(StorageError, match="is full"):
        make(model, tmp_path / "out", *names, calibration=DATA)
    again = make(model, tmp_path / "out", *names, calibration=DATA)
    assert [c.digest for c in again] == [c.digest for c in whole]
