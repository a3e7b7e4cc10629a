"""NVFP4 checkpoints as GGUF files: the numbers are the same, and llama.cpp computes with them."""

import gguf
import numpy as np
import pytest
import torch
from llamacpp import next_token, serve

from quantkit.conversion import convert
from quantkit.errors import CheckpointError, RecipeError
from quantkit.export.checkpoint import Checkpoint
from quantkit.gguf import nvfp4
from quantkit.gguf.values import dequantize
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.scoring import loading
from quantkit.verification.checkpoint import verify

KIND = gguf.GGMLQuantizationType.NVFP4


def test_blocks_are_those_of_the_official_package():
    chance = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (6, 192), generator=chance, dtype=torch.uint8)
    scale = torch.randint(1, 127, (6, 12), generator=chance, dtype=torch.uint8)
    data = nvfp4.pack(codes, scale)
    official = gguf.quants.dequantize(data.numpy(), KIND)
    np.testing.assert_array_equal(dequantize(data, KIND).numpy(), official)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    sign = 1 - 2 * (codes >> 3).float()
    widened = scale.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    assert torch.equal(dequantize(data, KIND), sign * table[(codes & 7).long()] * widened)


@pytest.fixture(scope="module")
def source(short_demo):
    return short_demo


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """A checkpoint with rounded inputs, which have scales of their own, and what comes of it."""
    out = tmp_path_factory.mktemp("made")
    text = out / "text.txt"
    text.write_text("Rain falls on the roof, and the cat sleeps until noon. " * 20)
    data = CalibrationChoice(str(text), 2, 32)
    plain = quantize(source, [load("nvfp4")], out, "cpu", calibration=data)[0]
    return plain, convert(plain.folder, "gguf")


def test_the_file_holds_the_numbers_of_the_checkpoint(made):
    plain, file = made
    before, after = (dict(each.state(torch.float32)) for each in (plain, file))
    assert before.keys() == after.keys()
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=2e-7, atol=0)
    assert {entry.kind for entry in file.gguf.tensors.values()} == {
        KIND, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F32,
    }  # fmt: skip
    inputs = plain.input_scale("model.layers.0.self_attn.q_proj")
    stored = file.gguf.dequantized("blk.0.attn_q.input_scale")
    torch.testing.assert_close(stored, inputs.float().reciprocal())
    assert file.manifest.converted_from.name == "nvfp4"


def test_it_passes_verification_and_damage_to_a_scale_does_not(made, source):
    _, file = made
    assert not verify(file.folder, source).faults
    entry = file.gguf.tensors["blk.1.ffn_up.scale"]
    whole = file.gguf.path.read_bytes()
    with file.gguf.path.open("rb+") as stream:
        stream.seek(entry.offset)
        stream.write(torch.tensor(float("nan")).numpy().tobytes())
    try:
        faults = verify(file.folder, source).faults
        assert any("blk.1.ffn_up.scale" in told for told in faults)
    finally:
        file.gguf.path.write_bytes(whole)


def test_llama_cpp_computes_with_them(made):
    _, file = made
    tokens = [5, 17, 300, 42, 7, 99, 1000, 12]
    model = loading.load(Checkpoint.open(file.folder), torch.device("cpu"))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    with serve(file.gguf.path) as server:
        found = next_token(server, tokens, len(expected))
    divergence = (expected.exp() * (expected - found)).sum().item()
    assert abs(divergence) < 2e-3  # llama.cpp rounds what goes into a layer to 8 bits


def test_what_llama_cpp_cannot_hold_is_refused(source, tiny_model, tmp_path):
    plain = quantize(source, [load("rtn-w4a16")], tmp_path, "cpu")[0]
    with pytest.raises(CheckpointError, match="only NVFP4"):
        convert(plain.folder, "gguf")
    narrow = ModelSource.open(str(tiny_model(hidden_size=96, intermediate_size=96)))
    plain = quantize(narrow, [load("rtn-nvfp4-a16")], tmp_path, "cpu")[0]
    with pytest.raises(CheckpointError, match="96 columns"):
        convert(plain.folder, "gguf")
    own = tmp_path / "own.yaml"
    own.write_text("summary: mine\ngguf: NVFP4\n")
    with pytest.raises(RecipeError, match="--to gguf"):
        load(str(own))
