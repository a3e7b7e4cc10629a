"""Mixtures of experts: made by the native engine where no data is needed, verified and scored."""

import json

import pytest
import torch
import transformers
from conftest import SIZES, with_tokenizer

from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource
from quantkit.quantize.run import quantize
from quantkit.recipe import load as recipe
from quantkit.score import loading
from quantkit.verify.checkpoint import verify

CPU = torch.device("cpu")
MIXTURE = {
    "vocab_size": 4096, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "dtype": "bfloat16",
}  # fmt: skip
FAMILIES = {
    "qwen2": transformers.Qwen2MoeConfig(
        **SIZES | MIXTURE, shared_expert_intermediate_size=128, decoder_sparse_step=1
    ),
    "qwen3": transformers.Qwen3MoeConfig(**SIZES | MIXTURE, head_dim=32),
    "olmoe": transformers.OlmoeConfig(
        **SIZES | MIXTURE | {"intermediate_size": 128, "moe_intermediate_size": None}
    ),
}
IDS = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=sorted(FAMILIES))
def mixture(request, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param])
    model.to(torch.bfloat16).save_pretrained(tmp_path / "mixture")
    return with_tokenizer(tmp_path / "mixture")


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def by_transformers(folder, state=None):
    """transformers' own experts; with the weights of `state`, by the names of checkpoints."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters() if state else ():
        *_, last = name.rpartition(".")
        if parameter.ndim == 3:
            experts = name.removesuffix(f".{last}")
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            rows = [
                torch.cat([state[f"{experts}.{n}.{part}.weight"] for part in parts])
                for n in range(len(parameter))
            ]
            parameter.data = torch.stack(rows)
        else:
            parameter.data = state[name]
    return model


def test_a_source_is_scored_as_transformers_computes_it(mixture):
    ours = logits(loading.load(ModelSource.open(mixture), CPU))
    assert torch.allclose(ours, logits(by_transformers(mixture)), atol=1e-5)


def test_weights_alone_are_scored_as_transformers_computes_them(mixture, tmp_path):
    (made,) = quantize(ModelSource.open(mixture), [recipe("rtn-w4a16")], tmp_path / "out", "cpu")
    state = dict(made.state(torch.float32))
    ours, theirs = logits(loading.load(made, CPU)), logits(by_transformers(mixture, state))
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, logits(by_transformers(mixture)), atol=1e-3)


def test_inputs_of_every_expert_are_rounded_where_the_format_does_that(mixture, tmp_path):
    (made,) = quantize(ModelSource.open(mixture), [recipe("fp8-dynamic")], tmp_path / "out", "cpu")
    seen = set()
    model = loading.load(made, CPU)
    for name in made.manifest.layers:
        # Hooks that round come first: what a layer gets has at most 256 values, scaled.
        def look(module, inputs, name=name):
            row = inputs[0].reshape(-1, inputs[0].shape[-1])[0]
            scaled = row / row.abs().max() * 448
            if torch.allclose(scaled, scaled.to(torch.float8_e4m3fn).float(), rtol=1e-5):
                seen.add(name)

        model.get_submodule(name).register_forward_pre_hook(look)
    logits(model)
    assert {name for name in made.manifest.layers if ".experts." in name} <= seen


def test_experts_are_quantised_and_routers_are_not(mixture, tmp_path):
    names = ["fp8-dynamic", "fp8-tensor", "rtn-w4a16"]
    quantize(ModelSource.open(mixture), [recipe(n) for n in names], tmp_path / "out", "cpu")
    for name in names:
        made = Checkpoint.open(tmp_path / "out" / name)
        experts = [layer for layer in made.manifest.layers if ".experts." in layer]
        assert len(experts) == 2 * 4 * 3  # blocks, experts, layers
        config = json.loads((made.folder / "config.json").read_text())["quantization_config"]
        assert {f"model.layers.{n}.mlp.gate" for n in (0, 1)} <= set(config["ignore"])
        result = verify(made.folder)
        assert result.ok, result.faults


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gptq-w4a16", "gptq-w4a16 is for --engine llmcompressor"),
        ("fp8-dynamic+kv-fp8", "fp8-dynamic+kv-fp8 is for --engine llmcompressor"),
        ("gguf-q8_0", "gguf-q8_0 is made from a GGUF file only"),
    ],
)
def test_what_needs_a_dense_model_is_refused(run_cli, tiny_experts, tmp_path, name, words):
    command = ["quantize", tiny_experts, "-r", name, "--calibration", "python-docs"]
    result = run_cli([*command, "-o", tmp_path / "out"])
    assert result.code == 3
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_whole_line(run_cli, tiny_experts, tmp_path):
    command = ["run", tiny_experts, "-r", "fp8-dynamic", "--tasks", "python_docs", "--limit", "2"]
    result = run_cli([*command, "--max-length", "64", "-o", tmp_path / "out"])
    assert result.code == 0, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["candidates"][0]["name"] == "fp8-dynamic"
