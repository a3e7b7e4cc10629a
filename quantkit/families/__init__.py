"""One record per model family, only for what cannot be read off the model itself.

A family without a record is still quantised, verified and scored: its layers are read off its
skeleton. Records hold what a config leaves out (`geometry.py`, `advise/families.py`), which layers
use sliding-window attention, and llama.cpp's names (`gguf/families.py`).
"""

from collections.abc import Mapping
from typing import Any

from quantkit.families.moe import MOE
from quantkit.families.record import FEEDFORWARD_NORMS, GELU, MULTIPLIERS, PRE_NORMS
from quantkit.families.record import Family as Family

GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

FAMILIES = {
    "llama": Family(
        mlp_bias=True, llamacpp="llama", architecture="LlamaForCausalLM", permuted=True
    ),
    "mistral": Family(
        attention_bias=False,
        n_kv_heads=8,
        llamacpp="llama",
        architecture="MistralForCausalLM",
        permuted=True,
    ),
    "qwen2": Family(
        attention_bias=True,
        n_kv_heads=32,
        windows="last",
        llamacpp="qwen2",
        architecture="Qwen2ForCausalLM",
    ),
    "qwen3": Family(
        head_norms="head",
        n_kv_heads=32,
        head_dim=128,
        windows="last",
        llamacpp="qwen3",
        architecture="Qwen3ForCausalLM",
    ),
    "gemma2": Family(
        PRE_NORMS + FEEDFORWARD_NORMS,
        tied=True,
        n_kv_heads=4,
        head_dim=256,
        windows="every",
        window_every=2,
        defaults={**GEMMA, **CAPS},
        llamacpp="gemma2",
        architecture="Gemma2ForCausalLM",
        shifted_norms=True,
        activations=GELU,
        wide_blocks=46,
        capped=True,
    ),
    "gemma3_text": Family(
        PRE_NORMS + FEEDFORWARD_NORMS,
        "head",
        tied=True,
        n_kv_heads=4,
        head_dim=256,
        windows="every",
        window_every=6,
        defaults=GEMMA,
        llamacpp="gemma3",
        architecture="Gemma3ForCausalLM",
        shifted_norms=True,
        activations=GELU,
        wide_blocks=62,
    ),
    "phi3": Family(
        attention_bias=False,
        packed=True,
        llamacpp="phi3",
        architecture="Phi3ForCausalLM",
        windowless=True,
        long_rope=True,
    ),
    "smollm3": Family(
        mlp_bias=True,
        tied=True,
        n_kv_heads=4,
        windows="unrotated",
        llamacpp="smollm3",
        architecture="SmolLM3ForCausalLM",
        permuted=True,
        unrotated_every=4,
    ),
    "seed_oss": Family(attention_bias=True, llamacpp="seed_oss", architecture="SeedOssForCausalLM"),
    "granite": Family(
        mlp_bias=True,
        defaults={"hidden_act": "silu", **dict.fromkeys(MULTIPLIERS, 1.0)},
        llamacpp="granite",
        architecture="GraniteForCausalLM",
        permuted=True,
        multiplied=True,
    ),
    "lfm2": Family(
        head_norms="head",
        mlp_parts=("w1", "w3", "w2"),
        tied=True,
        formulas=False,
        llamacpp="lfm2",
        architecture="Lfm2ForCausalLM",
        some_attention=True,
        keys={"shortconv.l_cache": "conv_L_cache"},
        fixed={"conv_bias": False},
        readable=False,
    ),
    "olmo2": Family(("post_attention_layernorm", "post_feedforward_layernorm"), "all"),
    **MOE,
}
UNKNOWN = Family()
EXPERTS_NOT_SERVED = {
    "gpt_oss": "vLLM (0.26 to 0.32) and transformers read the experts of gpt-oss in MXFP4 or in 16 "
    "bits, all of a block in one tensor, and not one by one as quantised experts are written here: "
    "serve the published model, whose experts are MXFP4, or put re:.*experts.* into the recipe's "
    "`ignore`, which keeps them in 16 bits",
}
"""Families whose quantised experts loaders do not read, and what to do."""
MXFP4_EXPERTS = ("gpt_oss",)
"""Families whose experts are published in MXFP4."""
NOT_SERVED = {
    "deepseek_v4": "vLLM before 0.30 computes DeepSeek V4's attention from published FP8 blocks "
    "and nothing else: serve this checkpoint with 0.30 or later",
}
"""Families that an engine does not load as written here (yet), and what to do."""
OTHER_CLASSES = {"kimi_k2": "DeepseekV3ForCausalLM"}
"""Model types that are another family's model: engines read them as that, by the class that their
configs name, and not with the code that they bring.
"""
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "zamba2": (r"re:.*\bfeed_forward\b.*", r"re:^model\.(q|k|v|o|qkv)_proj$"),
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        ("re:.*altup_projections.*", "re:.*per_layer_model_projection.*"),
    ),
}
"""Layers that stay in 16 bits, by vLLM's names where they differ from those in the files."""
CACHED = ("k_proj", "qkv_proj", "query_key_value", "kv_a_proj_with_mqa", "Wqkv", "c_attn")
"""Last names of the layers whose outputs are cached as keys and values."""
ROWS_BY_HEAD = {"gpt_neox": "query_key_value"}
"""Layers whose rows vLLM (before 0.32) reorders while loading, in every tensor of the layer alike:
a tensor without such rows, such as the `weight_shape` of packed weights, makes loading fail.
"""


def of(config: Mapping[str, Any]) -> Family:
    """The record of a model type, or the defaults."""
    return FAMILIES.get(str(config.get("model_type")), UNKNOWN)


def other_class(config: Mapping[str, Any]) -> str | None:
    """The class of a model type that is another family's model; None: it is one of its own."""
    named, wanted = config.get("architectures"), OTHER_CLASSES.get(str(config.get("model_type")))
    return wanted if isinstance(named, list) and wanted in named else None


def experts_note(config: Mapping[str, Any]) -> str | None:
    """What to know before serving a model with quantised experts."""
    return EXPERTS_NOT_SERVED.get(str(config.get("model_type")))


def serving_note(config: Mapping[str, Any]) -> str | None:
    """What to know before serving a quantised model of this family."""
    return NOT_SERVED.get(str(config.get("model_type")))


def other_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Patterns for 16-bit layers that have other names inside vLLM."""
    return OTHER_NAMES.get(str(config.get("model_type")), ())


def rows_by_head(config: Mapping[str, Any]) -> str | None:
    """Last name of the layers that are quantised only if each of their tensors has rows."""
    return ROWS_BY_HEAD.get(str(config.get("model_type")))


def fused() -> tuple[tuple[str, ...], ...]:
    """Names of linears in one module that vLLM loads as one fused layer."""
    parts = (family.mlp_parts[:2] for family in FAMILIES.values())
    return (("q_proj", "k_proj", "v_proj"), *dict.fromkeys(parts))


def folds() -> tuple[tuple[str, str], ...]:
    """Names of a linear and of the sibling that may feed it, up to elementwise products."""
    parts = ((down, up) for _, up, down in (family.mlp_parts for family in FAMILIES.values()))
    return (("o_proj", "v_proj"), *dict.fromkeys(parts))
