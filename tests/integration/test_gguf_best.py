"""GGUF files whose levels GPTQ chose: plain files of the same size, with less error."""

import inspect
import re
import subprocess

import pytest
import torch
from gguf import GGUFReader
from llamacpp import next_token, serve
from tiny import READABLE, cut_demo, save_llama, with_tokenizer

from quantkit.errors import DataError, HardwareError, RecipeError
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass import gguf_levels
from quantkit.onepass.from_gguf import quantize_file
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.ranks import Ranks
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.scoring import loading
from quantkit.verification.checkpoint import verify

TEXT = CalibrationChoice("python-docs", 16, 128)
TOKENS = list(range(40, 72))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return ModelSource.open(str(cut_demo(tmp_path_factory.mktemp("models") / "model", 2)))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """By GPTQ, as llama.cpp rounds, and a propagating recipe beside them."""
    names = ("gguf-best-q3_k_m", "gguf-q3_k_m", "gguf-best-q2_k", "gptq-w4a16")
    out = tmp_path_factory.mktemp("out")
    found = quantize(source, [load(name) for name in names], out, "cpu", TEXT)
    return {checkpoint.label: checkpoint for checkpoint in found}


def test_the_file_has_the_types_and_size_of_its_name(made):
    ours, theirs = (GGUFReader(made[n].gguf.path) for n in ("gguf-best-q3_k_m", "gguf-q3_k_m"))
    assert [(t.name, t.tensor_type) for t in ours.tensors] == [
        (t.name, t.tensor_type) for t in theirs.tensors
    ]
    assert made["gguf-best-q3_k_m"].gguf.path.stat().st_size == pytest.approx(
        made["gguf-q3_k_m"].gguf.path.stat().st_size, abs=64
    )


def test_every_layer_of_a_block_says_what_it_lost(made):
    ours, theirs = (made[name].manifest.layers for name in ("gguf-best-q3_k_m", "gguf-q3_k_m"))
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        if not name.startswith("model.layers."):  # the embedding, which has no inputs
            assert layer == theirs[name]
            continue
        assert 0 < layer.output_error < 0.2
        assert layer.damping is not None
        assert not layer.fallback


def logits(place, tokens):
    with torch.no_grad():
        return loading.load(place, torch.device("cpu"))(torch.tensor([tokens])).logits[0]


def test_the_model_is_closer_to_the_source(source, made):
    """On text that it did not learn from, of the same kind."""
    tokenizer = load_tokenizer(source.folder, False)
    tokens = tokenizer.encode(inspect.getdoc(subprocess) + inspect.getdoc(re))[:512]
    wanted = logits(source, tokens).log_softmax(-1)
    ours, theirs = (
        (wanted.exp() * (wanted - logits(made[name], tokens).log_softmax(-1))).sum(-1).mean()
        for name in ("gguf-best-q3_k_m", "gguf-q3_k_m")
    )
    assert ours < 0.8 * theirs


@pytest.mark.parametrize("name", ["gguf-best-q2_k", "gguf-best-q3_k_m"])
def test_llama_cpp_computes_what_our_reading_computes(made, name):
    expected = logits(made[name], TOKENS)[-1].log_softmax(-1)
    with serve(made[name].gguf.path) as server:
        found = next_token(server, TOKENS, len(expected))
    assert (expected.exp() * (expected - found)).sum() < 5e-3


def test_verification_passes(source, made):
    for name in ("gguf-best-q3_k_m", "gguf-best-q2_k"):
        result = verify(made[name].folder, source)
        assert not result.faults
        assert "weights" in result.passed


def test_other_recipes_beside_it_change_nothing(source, made, tmp_path):
    (alone,) = quantize(source, [load("gguf-best-q2_k")], tmp_path, "cpu", TEXT)
    assert alone.gguf.path.read_bytes() == made["gguf-best-q2_k"].gguf.path.read_bytes()


def test_a_stopped_run_resumes_and_ends_in_the_same_bytes(source, made, tmp_path, monkeypatch):
    seen = []
    see = gguf_levels.Levels.see

    def stop(self, visit, found):
        if len(seen) == 1:
            raise KeyboardInterrupt
        seen.append(visit.index)
        see(self, visit, found)

    monkeypatch.setattr(gguf_levels.Levels, "see", stop)
    recipe = [load("gguf-best-q2_k")]
    with pytest.raises(KeyboardInterrupt):
        quantize(source, recipe, tmp_path, "cpu", TEXT)
    again = []
    monkeypatch.setattr(
        gguf_levels.Levels,
        "see",
        lambda self, visit, found: (again.append(visit.index), see(self, visit, found))[1],
    )
    (resumed,) = quantize(source, recipe, tmp_path, "cpu", TEXT)
    assert (seen, again) == ([0], [1])
    assert resumed.gguf.path.read_bytes() == made["gguf-best-q2_k"].gguf.path.read_bytes()
    assert resumed.manifest.layers == made["gguf-best-q2_k"].manifest.layers
    assert not (resumed.folder / "journal").exists()


def test_it_needs_data_a_model_and_one_process(source, made, tmp_path):
    recipe = [load("gguf-best-q2_k")]
    with pytest.raises(DataError, match=r"gguf-best-q2_k.*--calibration"):
        quantize(source, recipe, tmp_path, "cpu")
    with pytest.raises(RecipeError, match=r"gguf-best-q2_k.*gguf-q2_k"):
        quantize_file(made["gguf-q3_k_m"].gguf.path, recipe, tmp_path, "cpu", requantize=True)

    class Two(Ranks):
        size = 2

    with pytest.raises(HardwareError, match=r"gguf-best-q2_k.*torchrun"):
        quantize(source, recipe, tmp_path, "cpu", TEXT, Run(ranks=Two()))


def test_experts_have_levels_of_their_own(tmp_path):
    """Each by its own tokens; one with too few keeps llama.cpp's levels."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=256, moe_intermediate_size=256,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    with torch.no_grad():  # no token asks for the last expert
        model.model.layers[0].mlp.gate.weight[3] = 0
        model.model.layers[0].mlp.gate.weight[:3] *= 50
    model.save_pretrained(tmp_path / "moe")
    source = ModelSource.open(str(with_tokenizer(tmp_path / "moe")))
    names = ("gguf-best-q4_k_m", "gguf-q4_k_m")
    ours, theirs = quantize(source, [load(n) for n in names], tmp_path / "out", "cpu", TEXT)
    name = "blk.0.ffn_up_exps.weight"
    found, usual = (file.gguf.read(name).view(4, 256, -1) for file in (ours, theirs))
    differ = [not torch.equal(a, b) for a, b in zip(found, usual, strict=True)]
    assert sum(differ) >= 2
    layer = ours.manifest.layers["model.layers.0.mlp.experts.up_proj"]
    assert layer.damping is not None
    assert not verify(ours.folder, source).faults


def test_a_model_without_k_quants_says_so_and_gets_the_usual_file(tmp_path):
    """Rows of 128, which blocks of 256 do not divide."""
    save_llama(tmp_path / "model", **READABLE, num_hidden_layers=1, intermediate_size=128)
    source = ModelSource.open(str(with_tokenizer(tmp_path / "model")))
    names = ("gguf-best-q4_k_m", "gguf-q4_k_m")
    ours, theirs = quantize(source, [load(n) for n in names], tmp_path / "out", "cpu", TEXT)
    assert any("no layer is stored as a K-quant" in note for note in ours.manifest.notes)
    assert ours.gguf.path.read_bytes() == theirs.gguf.path.read_bytes()
