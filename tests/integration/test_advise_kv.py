"""Bytes of the KV cache foretold are those that transformers keeps while it generates."""

import pytest
import torch
import transformers
from families import FAMILIES, SMALL
from transformers import DynamicCache

from quantkit.advise import kv
from quantkit.advise.families import completed
from quantkit.errors import SourceError
from quantkit.families import geometry

MORE = {
    "one head for all": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "a head each": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "wide heads": transformers.Qwen3Config(**SMALL | {"head_dim": 64}),
    "mistral without windows": transformers.MistralConfig(**SMALL, sliding_window=None),
    "gemma3 of thirteen layers": transformers.Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 13}, sliding_window=16
    ),
    "qwen2 with late windows": transformers.Qwen2Config(
        **SMALL | {"num_hidden_layers": 5},
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=3,
    ),
    "own pattern": transformers.Qwen3Config(
        **SMALL | {"num_hidden_layers": 3},
        sliding_window=8,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "phi3 with windows": transformers.Phi3Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, sliding_window=16
    ),
}
EVERY = FAMILIES | MORE


def attended(config, context, dtype):
    """Bytes of all keys and values that the last token of a sequence attends to."""
    cache = DynamicCache(config=config)
    heads, size = config.num_key_value_heads, getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    total = 0
    for layer in range(config.num_hidden_layers):
        if context > 1:
            before = torch.zeros(1, heads, context - 1, size, dtype=dtype)
            cache.update(before, before.clone(), layer)
        last = torch.zeros(1, heads, 1, size, dtype=dtype)
        total += sum(part.numel() * part.element_size() for part in cache.update(last, last, layer))
    return total


@pytest.mark.parametrize("context", [1, 7, 8, 15, 16, 17, 100])
@pytest.mark.parametrize("name", EVERY)
def test_bytes_are_those_of_the_cache_in_every_attention(name, context):
    config = EVERY[name]
    said = config.to_dict()
    for bits, dtype in ((16, torch.bfloat16), (8, torch.float8_e4m3fn)):
        assert kv.bytes_for(said, context, bits) == attended(config, context, dtype)


@pytest.mark.parametrize("name", [n for n in EVERY if n != "own pattern"])
def test_patterns_are_those_of_the_class_where_the_config_names_none(name):
    config = EVERY[name]
    said = config.to_diff_dict() | {"num_hidden_layers": config.num_hidden_layers}
    said.pop("layer_types", None)
    said = {"model_type": config.model_type, **completed(said)}
    if name.startswith(("gemma", "mistral", "phi3")):
        said["sliding_window"] = config.sliding_window
    assert kv.bytes_for(said, 50) == attended(config, 50, torch.bfloat16)


def test_latent_attention_keeps_what_its_projection_gives():
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=2, vocab_size=128, n_group=1, topk_group=1,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    kept = sum(layer.self_attn.kv_a_proj_with_mqa.out_features for layer in model.model.layers)
    assert kv.bytes_for(config.to_dict(), 10) == kept * 10 * 2
    assert kv.bytes_for(config.to_dict(), 10, n_gpus=4) == kept * 10 * 2


def test_heads_are_divided_over_gpus_and_copied_where_there_are_too_few():
    said = FAMILIES["llama"].to_dict()
    one, two, four = (kv.bytes_for(said, 64, n_gpus=n) for n in (1, 2, 4))
    assert (two, four) == (one // 2, one // 2)


def test_layers_of_an_unknown_kind_are_refused():
    said = FAMILIES["llama"].to_dict() | {"layer_types": ["full_attention", "folded_attention"]}
    with pytest.raises(SourceError, match="folded_attention"):
        kv.bytes_for(said, 10)


COMPRESSED = transformers.DeepseekV4Config(
    vocab_size=128, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=2, head_dim=32, q_lora_rank=32, o_lora_rank=16, o_groups=2,
    n_routed_experts=4, num_experts_per_tok=2, index_n_heads=2, index_head_dim=16, index_topk=8,
    sliding_window=16, partial_rotary_factor=0.5, compress_rates={
        "compressed_sparse_attention": 4, "heavily_compressed_attention": 8,
    }, layer_types=[
        "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
    ],
)  # fmt: skip


def test_what_is_compressed_beyond_a_window_is_what_the_model_keeps():
    model = transformers.AutoModelForCausalLM.from_config(COMPRESSED, attn_implementation="eager")
    with torch.no_grad():
        kept = model(torch.ones(1, 40, dtype=int), use_cache=True).past_key_values.layers
    for layer, found in list(zip(kv.layers(COMPRESSED.to_dict()), kept, strict=True))[1:]:
        numbers = sum(t.numel() for t in found.compressed_kv.values())
        assert layer.values(40) - layer.values(0) == layer.n_values * 16 + numbers
        assert layer.n_values == found.keys.shape[-1] * found.keys.shape[1]
        assert layer.attended(40) == 16 + 40 // layer.rate
    published = {"compress_ratios": [128, 4, 0, 0], "num_hidden_layers": 3, "layer_types": None}
    kinds = geometry.layer_types(COMPRESSED.to_dict() | published)
    assert kinds == [*COMPRESSED.layer_types[1:], COMPRESSED.layer_types[0]]


NARROW = {k: v for k, v in SMALL.items() if k != "head_dim"}
RECURRENT = {
    "qwen3_next": transformers.Qwen3NextConfig(
        **SMALL, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "lfm2": transformers.Lfm2Config(**NARROW, layer_types=["conv", "full_attention"]),
    "bamba": transformers.BambaConfig(
        **NARROW, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16,
    ),
}  # fmt: skip


def tensors(part):
    """All tensors that an object of transformers holds."""
    if torch.is_tensor(part):
        return [part]
    inside = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [tensor for each in inside for tensor in tensors(each)]


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_is_no_smaller_than_the_model_keeps(name):
    config = RECURRENT[name]
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        first, last = model(torch.ones(1, 40, dtype=int), use_cache=True).past_key_values.layers
    numbers = sum(tensor.numel() for tensor in tensors(vars(first)))
    state, full = kv.layers(config.to_dict())
    assert numbers
    assert numbers <= state.values(40) == state.values(4000) <= 3 * numbers
    assert full.values(40) == last.keys.numel() + last.values.numel()
    half = kv.layers(config.to_dict(), n_gpus=2)[0]
    assert half.values(40) == state.values(40) // 2


PUBLISHED = {
    "qwen3_next": ({"full_attention_interval": 4}, "llla"),
    "nemotron_h": ({"hybrid_override_pattern": "M-*E"}, "m-a-"),
    "kimi_linear": ({"linear_attn_config": {"full_attn_layers": [4], "num_heads": 2}}, "llla"),
    "jamba": ({"attn_layer_period": 4, "attn_layer_offset": 2}, "mmam"),
    "lfm2": ({"full_attn_idxs": [1]}, "cacc"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_name_their_layers_in_many_ways(name):
    said, expected = PUBLISHED[name]
    found = geometry.layer_types({"model_type": name, "num_hidden_layers": 4, **said})
    letters = {"linear_attention": "l", "mamba": "m", "conv": "c", "full_attention": "a"}
    assert "".join(letters.get(kind, "-") for kind in found) == expected
