"""One record per model family, only for what cannot be read off the model itself.

A family without a record is still quantised, verified and scored: its layers are read off its
skeleton. Records hold what a config leaves out (`geometry.py`, `advise/families.py`), which layers
use sliding-window attention, and llama.cpp's names (`gguf/families.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh",)


@dataclass(frozen=True)
class Family:
    """What a model type has beyond the standard architecture, and what its config may omit."""

    norms: tuple[str, ...] = PRE_NORMS
    head_norms: str = ""
    """Norms of queries and keys: per `head`, over `all` heads together, or none."""
    attention_bias: bool | None = None
    """Whether q/k/v have biases while o has none; None: the config decides for all four."""
    mlp_bias: bool = False
    """The MLP has biases where the config's `mlp_bias` says so."""
    packed: bool = False
    """q/k/v are one layer, and so are gate and up."""
    experts: str = ""
    """Path of the experts of an MoE block and their router."""
    mlp_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names in an MLP or expert: gate, up and down."""
    tied: bool = False
    n_kv_heads: int | None = None
    """If the config does not say; None: as many as attention heads."""
    head_dim: int | None = None
    """If the config does not say; None: the hidden size over the heads."""
    windows: Literal["all", "every", "last", "unrotated"] = "all"
    """Layers that use the sliding window, if there is one and the config does not list them: all,
    all but every `window_every`-th, those after `max_window_layers`, or those without rotary
    embedding.
    """
    window_every: int = 0
    """Every n-th block uses full attention, the others a window."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    """Other settings that a GGUF file needs."""

    # For llama.cpp. Facts are from its own converter and model sources.
    llamacpp: str = ""
    """Value of `general.architecture`; empty if quantkit does not write GGUF for it."""
    architecture: str = ""
    """The transformers class that is written under this name."""
    permuted: bool = False
    """Rotary pairs are adjacent in llama.cpp, halves of a head in transformers."""
    shifted_norms: bool = False
    """Norms multiply by one plus their weight in transformers."""
    activations: tuple[str, ...] = SILU
    wide_blocks: int = 0
    """Block count of the one size whose attention scale comes from hidden size over heads."""
    capped: bool = False
    """Attention and output are soft-capped."""
    multiplied: bool = False
    """The config has multipliers of attention, embeddings, residuals and logits."""
    windowless: bool = False
    """The file must say that there is no window; otherwise it is taken for an older model."""
    long_rope: bool = False
    """Rotary embedding may be scaled by `longrope`."""
    unrotated_every: int = 0
    """Every n-th block has no rotary embedding; 0: all have."""
    weights_sum_to_one: bool = True
    """Whether the router weights of a token's experts are normalised to sum to one."""


GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
MULTIPLIERS = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip

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
    "olmo2": Family(("post_attention_layernorm", "post_feedforward_layernorm"), "all"),
    "mixtral": Family(
        attention_bias=False,
        experts="block_sparse_moe",
        mlp_parts=("w1", "w3", "w2"),
        n_kv_heads=8,
        llamacpp="llama",
        architecture="MixtralForCausalLM",
        permuted=True,
    ),
    "olmoe": Family(
        head_norms="all",
        experts="mlp",
        llamacpp="olmoe",
        architecture="OlmoeForCausalLM",
        weights_sum_to_one=False,
    ),
    "qwen2_moe": Family(
        attention_bias=True,
        experts="mlp",
        n_kv_heads=16,
        llamacpp="qwen2moe",
        architecture="Qwen2MoeForCausalLM",
        weights_sum_to_one=False,
    ),
    "qwen3_moe": Family(
        head_norms="head",
        experts="mlp",
        n_kv_heads=4,
        llamacpp="qwen3moe",
        architecture="Qwen3MoeForCausalLM",
    ),
    "gpt_oss": Family(
        mlp_bias=True,
        experts="mlp",
        n_kv_heads=8,
        head_dim=64,
        windows="every",
        window_every=2,
        defaults={"hidden_act": "silu", "attention_bias": True, "mlp_bias": True},
    ),
}
UNKNOWN = Family()
EXPERTS_NOT_SERVED = {
    "gpt_oss": "vLLM (0.26 to 0.32) and transformers read the experts of gpt-oss in MXFP4 or in 16 "
    "bits, all of a block in one tensor, and not one by one as quantised experts are written here: "
    "serve the published model, whose experts are MXFP4, or put re:.*experts.* into the recipe's "
    "`ignore`, which keeps them in 16 bits",
}
"""Families whose quantised experts loaders do not read, and what to do."""
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
