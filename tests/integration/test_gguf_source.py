"""GGUF files as sources: of checkpoints in any format, and of plain folders."""

import json
import shutil

import pytest
import torch
import transformers
from families import SMALL, make_source
from safetensors import safe_open
from tiny import READABLE, save_llama

import quantkit
from quantkit.errors import SourceError
from quantkit.gguf import source as files
from quantkit.gguf.reader import read_file
from quantkit.gguf.writer import GGUFFile
from quantkit.model.source import ModelSource

LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    return save_llama(folder, **READABLE | {"hidden_size": 256, "head_dim": 64})


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    """K-quants of somebody who left no manifest."""
    out = tmp_path_factory.mktemp("gguf")
    (made,) = quantkit.quantize(model, ["gguf-q4_k_m"], out=out, device="cpu")
    place = out / "somebody" / "model-Q4_K_M.gguf"
    place.parent.mkdir()
    shutil.copyfile(made.gguf.path, place)
    return place


def rewritten(file, path, **keys):
    """The same file with other keys."""
    held = read_file(file)
    entries = [(e.name, e.shape, e.kind) for e in held.tensors.values()]
    new = GGUFFile(path, {k: held.stored(k) for k in held.metadata} | keys, entries)
    for name in held.tensors:
        new.write(name, held.read(name))
    new.close()
    return path


def test_a_file_is_quantised_in_another_format_only_when_that_is_wanted(file, tmp_path, run_cli):
    asked = ["quantize", file, "-r", "rtn-w4a16", "-r", "gguf-q8_0", "-o", tmp_path]
    refused = run_cli([*asked, "--device", "cpu"])
    assert refused.code == 3
    assert "is already quantised" in refused.stderr
    assert "--requantize" in refused.stderr
    made = run_cli([*asked, "--device", "cpu", "--requantize"])
    assert made.code == 0, made.stderr
    manifest = json.loads((tmp_path / "rtn-w4a16" / "quantkit.json").read_bytes())
    assert manifest["source"]["name"] == str(file.resolve())
    assert any("from weights that GGUF (Q4_K, Q6_K)" in note for note in manifest["notes"])
    # The source is found again by its name, and its fingerprint is that of the file.
    for recipe in ("rtn-w4a16", "gguf-q8_0"):
        checked = run_cli(["verify", tmp_path / recipe])
        assert checked.code == 0, checked.stderr + checked.stdout
        assert "weights" in checked.stdout
    beside = run_cli(["verify", tmp_path / "rtn-w4a16", "--source", file])
    assert beside.code == 0, beside.stderr + beside.stdout


def test_calibrated_recipes_start_from_a_file(file, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A model of language, and what it read. " * 400)
    (made,) = quantkit.quantize(
        file, ["gptq-w4a16"], out=tmp_path / "out", calibration=text, samples=4, length=64,
        requantize=True, device="cpu",
    )  # fmt: skip
    assert made.manifest.calibration is not None
    held = files.open_file(file, requantize=True)
    error = (made.weight(LAYER.removesuffix(".weight")) - held.tensors[LAYER].read()).norm()
    assert error < 0.2 * held.tensors[LAYER].read().float().norm()
    assert quantkit.verify(made).ok


@pytest.mark.parametrize("to", ["bf16", "f32"])
def test_a_file_becomes_a_folder_that_transformers_loads(file, model, tmp_path, run_cli, to):
    out = tmp_path / "plain"
    made = run_cli(["convert", file, "--to", to, "-o", out, "--json"])
    assert made.code == 0, made.stderr
    told = json.loads(made.stdout)
    assert told["quantized_by"].startswith("GGUF (Q4_K, Q6_K) of quantkit")
    assert json.loads((out / "dequantized.json").read_bytes())["source"] == str(file.resolve())
    assert "GGUF (Q4_K, Q6_K)" in (out / "README.md").read_text()
    found = transformers.AutoModelForCausalLM.from_pretrained(out)
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[to]
    assert found.dtype == dtype
    assert transformers.AutoTokenizer.from_pretrained(out).encode("A text")
    held = read_file(file)
    for name, of_file in (
        (LAYER, "blk.1.ffn_down.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
    ):
        expected = held.dequantized(of_file).to(dtype)
        assert torch.equal(found.state_dict()[name], expected)
    # A folder like any other: it says what it is, and is replaced only when that is asked for.
    assert ModelSource.open(str(out)).quantized_by is None
    assert run_cli(["convert", file, "--to", to, "-o", out]).code == 3
    assert run_cli(["convert", file, "--to", to, "-o", out, "--force"]).code == 0


@pytest.mark.parametrize(("recipe", "form"), [("rtn-w4a16", "gptq"), ("fp8-dynamic", None)])
def test_a_quantised_folder_becomes_a_plain_one(model, tmp_path, run_cli, recipe, form):
    (made,) = quantkit.quantize(model, [recipe], out=tmp_path, format=form, device="cpu")
    converted = run_cli(["convert", made.folder, "--to", "bf16"])
    assert converted.code == 0, converted.stderr
    out = tmp_path / f"{made.folder.name}-bf16"
    assert converted.stdout.endswith(f"written to {out}\n")
    assert "quantization_config" not in json.loads((out / "config.json").read_bytes())
    with safe_open(out / "model.safetensors", "pt") as held:
        assert set(held.keys()) == set(ModelSource.open(str(model)).tensors)
        expected = made.weight(LAYER.removesuffix(".weight")).to(torch.bfloat16)
        assert torch.equal(held.get_tensor(LAYER), expected)
    twice = run_cli(["convert", out, "--to", "bf16", "-o", tmp_path / "twice"])
    assert twice.code == 3
    assert "is not quantised" in twice.stderr


def test_an_expert_is_read_without_the_others(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **SMALL | {"hidden_size": 256}, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=256, norm_topk_prob=True,
    )  # fmt: skip
    _, source = make_source("qwen3_moe", tmp_path / "model", config)
    (made,) = quantkit.quantize(source, ["gguf-q4_k_s"], out=tmp_path / "out", device="cpu")
    held = made.gguf
    name = "blk.1.ffn_down_exps.weight"
    whole = held.dequantized(name)
    for index in range(4):
        assert torch.equal(held.dequantized(name, index), whole[index])
    found = files.open_file(held.path, requantize=True)
    assert found.tensors.keys() == source.tensors.keys()
    expert = "model.layers.1.mlp.experts.2.down_proj.weight"
    assert torch.equal(found.tensors[expert].read(), whole[2].bfloat16())
    (again,) = quantkit.quantize(
        held.path, ["fp8-dynamic"], out=tmp_path / "fp8", requantize=True, device="cpu"
    )
    assert quantkit.verify(again).ok


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": "falcon"}, "is of architecture falcon"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5"),
        ({"llama.attention.key_length": 32}, "value_length"),
        ({"llama.rope.scaling.type": "su"}, "scales its rotary frequencies by su"),
        ({"tokenizer.ggml.pre": "mine"}, "pre-tokenizer is 'mine'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer's kind is t5"),
        ({"tokenizer.ggml.bos_token_id": 5000}, "is not the id of a token"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_config_cannot_say_is_refused(file, tmp_path, change, words):
    other = rewritten(file, tmp_path / "other.gguf", **change)
    with pytest.raises(SourceError, match=words) as caught:
        files.open_file(other, requantize=True)
    assert str(caught.value).startswith(str(other))
    assert "the model that it was made from" in str(caught.value)


def test_the_folder_of_a_file_goes_with_it(file):
    source = files.open_file(file, requantize=True)
    folder = source.folder
    assert (folder / "config.json").is_file()
    del source
    assert not folder.exists()
