"""Mixtures of experts become GGUF files with which llama.cpp computes what transformers does.

Those whose files are also read as models are in test_gguf_convert.py.
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
import transformers
from families import SMALL, make_source
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as AUTO

import quantkit
from quantkit.errors import SourceError
from quantkit.gguf.layout import Layout
from quantkit.gguf.plan import layer_of
from quantkit.gguf.source import open_file
from quantkit.model.source import ModelSource
from quantkit.scoring import loading

pytest.importorskip("gguf")
llamacpp = pytest.importorskip("llamacpp", reason="llama.cpp is not installed")
floats = pytest.importorskip("gguf_floats")

SIZES = SMALL | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "initializer_range": 0.1}
NO_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
}
LATENT = ROUTED | {
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
# With few heads many scores are zero, and equals are ranked in any order.
INDEXED = {"index_topk": 16, "index_head_dim": 64, "index_n_heads": 8}
UNSCALED = {"routed_scaling_factor": 1.0}
DENSE_FIRST = {"first_k_dense_replace": 1}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}
MULTIPLIERS = {
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
NEMOTRON = {key: value for key, value in SIZES.items() if key != "num_hidden_layers"} | {
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
}
CONFIGS = {
    "gpt_oss": transformers.GptOssConfig(
        **SIZES | LOCAL, sliding_window=16, rope_parameters=YARN | {"truncate": True}
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **NO_HEAD_DIM | LATENT | DENSE_FIRST | {"n_routed_experts": 8},
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v2, queries at once": transformers.DeepseekV2Config(
        **NO_HEAD_DIM | LATENT | DENSE_FIRST | {"q_lora_rank": None},
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "glm4_moe": transformers.Glm4MoeConfig(
        **SIZES | ROUTED | DENSE_FIRST, use_qk_norm=True, attention_bias=True
    ),
    "glm4_moe_lite": transformers.Glm4MoeLiteConfig(
        **NO_HEAD_DIM | LATENT, mlp_layer_types=["dense", "sparse"]
    ),
    "glm_moe_dsa": transformers.GlmMoeDsaConfig(
        **NO_HEAD_DIM | LATENT | INDEXED, mlp_layer_types=["dense", "sparse"]
    ),
    "glm_moe_dsa, one choice for two blocks": transformers.GlmMoeDsaConfig(
        **NO_HEAD_DIM | LATENT | INDEXED | {"num_hidden_layers": 3},
        indexer_types=["full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "deepseek_v32": transformers.DeepseekV32Config(
        **NO_HEAD_DIM | LATENT | DENSE_FIRST | INDEXED | {"n_routed_experts": 8},
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "minimax_m2": transformers.MiniMaxM2Config(
        **SIZES | LOCAL, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "mimo_v2_flash": transformers.MiMoV2FlashConfig(
        **SIZES | ROUTED | {"num_attention_heads": 4, "num_hidden_layers": 3} | UNSCALED,
        v_head_dim=24,
        attention_value_scale=0.7,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "granitemoe": transformers.GraniteMoeConfig(**NO_HEAD_DIM | LOCAL, **MULTIPLIERS),
    "granitemoeshared": transformers.GraniteMoeSharedConfig(
        **NO_HEAD_DIM | LOCAL, shared_intermediate_size=128
    ),
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(
        **NO_HEAD_DIM | {"num_hidden_layers": 3},
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
    ),
    "hunyuan_v1_moe": transformers.HunYuanMoEV1Config(
        **SIZES,
        num_experts=4,
        moe_topk=2,
        rope_parameters={
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0,
        },
    ),
    "qwen3_next": transformers.Qwen3NextConfig(
        **SIZES | {"num_hidden_layers": 4},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    "llama4_text": transformers.Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1},
        intermediate_size_mlp=128,
        interleave_moe_layer_step=2,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    ),
    "lfm2": transformers.Lfm2Config(
        **NO_HEAD_DIM | {"num_hidden_layers": 3}, layer_types=["conv", "full_attention", "conv"]
    ),
    "granitemoehybrid": transformers.GraniteMoeHybridConfig(
        **NO_HEAD_DIM | LOCAL | MAMBA | {"num_hidden_layers": 3},
        **MULTIPLIERS,
        shared_intermediate_size=128,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "granitemoehybrid, rotated and without experts": transformers.GraniteMoeHybridConfig(
        **NO_HEAD_DIM | MAMBA | {"num_local_experts": 0},
        shared_intermediate_size=128,
        position_embedding_type="rope",
        layer_types=["linear_attention", "full_attention"],
    ),
    "granitemoehybrid, attention alone": transformers.GraniteMoeHybridConfig(
        **NO_HEAD_DIM | MAMBA | {"num_local_experts": 0},
        **MULTIPLIERS,
        shared_intermediate_size=128,
        position_embedding_type="rope",
        layer_types=["full_attention", "full_attention"],
    ),
    "nemotron_h": transformers.NemotronHConfig(
        **NEMOTRON | ROUTED,
        moe_shared_expert_intermediate_size=96,
        moe_latent_size=32,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    ),
    "nemotron_h, without experts": transformers.NemotronHConfig(
        **NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]
    ),
    "lfm2_moe": transformers.Lfm2MoeConfig(
        **NO_HEAD_DIM | {"num_hidden_layers": 3},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
}  # fmt: skip
TOLERANCE = 2e-4
WRONG = {
    "gpt_oss": {"attention.sliding_window": 4},
    "deepseek_v3": {
        "expert_group_used_count": 1,
        "rope.scaling.yarn_log_multiplier": 0.05,
        "expert_gating_func": 1,
    },
    "deepseek_v32": {"attention.indexer.top_k": 4},
    "glm_moe_dsa": {"attention.indexer.top_k": 4},
    "glm4_moe": {"expert_weights_scale": 1.0, "expert_weights_norm": False},
    "granitemoehybrid": {"logit_scale": 5.0},
    "hunyuan_v1_moe": {"rope.freq_base": 1e4},
    "mimo_v2_flash": {"attention.value_scale": 0.5, "attention.sliding_window": 4},
    "nemotron_h": {"attention.layer_norm_rms_epsilon": 1.0},
}
"""Keys with which a file loads, but must not compute the same."""


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    name = request.param.split(",")[0]
    return name, *make_source(name, tmp_path_factory.mktemp("moe"), CONFIGS[request.param])


def test_llama_cpp_computes_what_transformers_computes(model, tmp_path):
    name, expected, source = model
    layout, path = Layout.of(source), tmp_path / "model.gguf"
    floats.convert(source, path, layout=layout)
    assert floats.largest_difference(expected, path) < TOLERANCE
    for key, value in WRONG.get(name, {}).items():
        wrong = layout.metadata | {f"{layout.architecture}.{key}": value}
        assert wrong.keys() == layout.metadata.keys(), key
        path.unlink()
        floats.convert(source, path, layout=replace(layout, metadata=wrong))
        assert floats.largest_difference(expected, path) > 50 * TOLERANCE, key


def test_every_tensor_is_restored_and_no_two_layers_share_a_name(model):
    _, _, source = model
    layout = Layout.of(source)
    restored = dict(layout.restore(lambda name: layout.build(name).float()))
    tied = layout.config["tie_word_embeddings"]
    assert restored.keys() == source.tensors.keys() - ({"lm_head.weight"} if tied else set())
    for name, weight in restored.items():
        expected = source.tensors[name].read().float()
        if name.endswith("A_log"):  # written as its exponential
            assert torch.allclose(weight, expected, rtol=1e-5), name
        else:
            assert torch.equal(weight, expected), name
    for tensor in layout.tensors:
        assert tuple(layout.build(tensor.name).shape) == tensor.shape
    assert Layout.of_folder(source.folder).by_name == layout.by_name
    assert len(layout.by_name) == len({layer_of(t) for t in layout.tensors if t.parts})


def test_a_file_of_them_is_not_read_as_a_model(tmp_path):
    _, source = make_source("granitemoe", tmp_path, CONFIGS["granitemoe"])
    floats.convert(source, tmp_path / "model.gguf")
    with pytest.raises(SourceError, match="architecture granitemoe, which quantkit cannot write"):
        open_file(tmp_path / "model.gguf")


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    _, source = make_source("deepseek_v3", tmp_path, CONFIGS["deepseek_v3"])
    expected = Layout.of(source)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    found = Layout.of(ModelSource.open(str(tmp_path)))
    assert (found.metadata, found.tensors) == (expected.metadata, expected.tensors)


def test_heads_that_predict_further_tokens_are_left_out(tmp_path):
    config = copy.deepcopy(CONFIGS["glm4_moe"])
    config.num_nextn_predict_layers = 1
    _, source = make_source("glm4_moe", tmp_path, config)
    head = replace(source.tensors["model.norm.weight"], name="model.layers.2.hnorm.weight")
    found = Layout.of(replace(source, tensors={**source.tensors, head.name: head}))
    assert found.tensors == Layout.of(source).tensors
    beyond = replace(head, name="model.layers.3.hnorm.weight")
    with pytest.raises(SourceError, match=r"model\.layers\.3\.hnorm\.weight"):
        Layout.of(replace(source, tensors={**source.tensors, beyond.name: beyond}))


GROUPS = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
REFUSED = {
    "deepseek_v2": (GROUPS, "topk_method group_limited_greedy"),
    "deepseek_v3": ({"rope_parameters": YARN}, "another mscale than mscale_all_dim"),
    "glm4_moe_lite": ({"mlp_layer_types": ["sparse", "dense"]}, "blocks without experts"),
    "granitemoehybrid": ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit \[0\.0, 1\.0\]"),
    "lfm2_moe": ({"routed_scaling_factor": 2.0}, "routed_scaling_factor 2.0"),
    "mimo_v2_flash": ({"routed_scaling_factor": 2.0}, "routed_scaling_factor 2.0"),
    "nemotron_h": (
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        "MLPs both with and without experts",
    ),
    "glm_moe_dsa": ({"index_head_dim": 32}, "index_head_dim 32"),
    "gpt_oss": ({"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
    "llama4_text": ({"use_qk_norm": False}, "use_qk_norm False"),
    "qwen3_next": ({"linear_value_head_dim": 32}, "values wider or narrower than keys"),
    "phimoe": ({}, "PhimoeForCausalLM, which GGUF output does not support: llama.cpp"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_compute_differently_is_refused(name, tmp_path):
    settings, reason = REFUSED[name]
    known = next((c for n, c in CONFIGS.items() if n.split(",")[0] == name), None)
    config = known or transformers.PhimoeConfig(**NO_HEAD_DIM | LOCAL)
    values = config.to_dict() | {"architectures": [AUTO[config.model_type]]} | settings
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SourceError, match=reason):
        Layout.of_folder(tmp_path)


WIDE = {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "v_head_dim": 32}


def test_layers_in_two_parts_are_calibrated_verified_and_scored(tmp_path):
    config = CONFIGS["deepseek_v3"].to_dict() | WIDE
    _, source = make_source(
        "deepseek_v3", tmp_path / "model", transformers.DeepseekV3Config(**config)
    )
    text = tmp_path / "text.txt"
    text.write_text("Keys and values of every head come from one narrow vector. " * 200)
    (made,) = quantkit.quantize(
        source.folder,
        ["gguf-best-q4_k_m"],
        out=tmp_path / "out",
        calibration=text,
        samples=8,
        length=64,
    )
    assert quantkit.verify(made, source=source.folder).ok
    layer = "model.layers.1.self_attn.kv_b_proj"
    keys, values = (made.manifest.layers[f"{layer}.attn_{part}_b"] for part in "kv")
    assert keys.output_error is None  # as transposed, GPTQ does not know its inputs
    assert values.output_error is not None
    (path,) = made.folder.glob("model-*.gguf")
    ours = loading.load(made, torch.device("cpu"))
    assert floats.largest_difference(ours, path) < 0.5  # llama.cpp rounds inputs too
