"""Attention heads and windows, from the config or from the defaults of its class."""

from collections.abc import Mapping
from typing import Any

from quantkit import families

FULL, SLIDING = "full_attention", "sliding_attention"


def of_object(config: Any) -> dict[str, Any]:
    """The settings used here, from a transformers config, whose names may differ."""
    asked = ("model_type", "head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads")
    return {key: _value(config, key) for key in asked}


def _value(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, None)
    except Exception:  # refused where values differ between layers; blocks have their own
        return vars(config).get(key)


def head_dim(config: Mapping[str, Any]) -> int:
    """Dimension of one attention head."""
    return int(
        config.get("head_dim")
        or families.of(config).head_dim
        or config["hidden_size"] // (config["num_attention_heads"] or 1)
    )


def n_kv_heads(config: Mapping[str, Any]) -> int:
    """Number of key/value heads."""
    return int(
        config.get("num_key_value_heads")
        or families.of(config).n_kv_heads
        or (1 if config.get("multi_query") else config.get("num_attention_heads"))
        or 0
    )


PATTERN = {"M": "mamba", "*": FULL, "-": "mlp", "E": "moe"}
"""Letters by which Nemotron-H's configs name their layers."""


RATIOS = {
    0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention",
}  # fmt: skip
"""Numbers by which DeepSeek V4's published configs name theirs."""


def _hybrid(config: Mapping[str, Any]) -> list[str]:
    """The same of models with recurrent layers, in the words of their published configs."""
    if listed := config.get("layers_block_type"):
        return [FULL if kind == "attention" else str(kind) for kind in listed]
    if pattern := config.get("hybrid_override_pattern"):
        return [PATTERN.get(letter, letter) for letter in pattern]
    layers = range(int(config.get("num_hidden_layers") or 0))
    if ratios := config.get("compress_ratios"):
        return [RATIOS.get(ratio, str(ratio)) for ratio in ratios[: len(layers)]]
    if (every := config.get("full_attention_interval")) is not None:
        return [FULL if (index + 1) % every == 0 else "linear_attention" for index in layers]
    if kda := config.get("linear_attn_config"):  # counted from one
        full = kda.get("full_attn_layers") or ()
        return [FULL if index + 1 in full else "linear_attention" for index in layers]
    if (places := config.get("full_attn_idxs")) is not None:
        return [FULL if index in places else "conv" for index in layers]
    if (places := config.get("attn_layer_indices")) is not None:
        return [FULL if index in places else "mamba" for index in layers]
    if (period := config.get("attn_layer_period")) is not None:
        offset = config.get("attn_layer_offset") or 0
        return [FULL if index % period == offset else "mamba" for index in layers]
    return []


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Attention type of every layer, from the config's list or its family's rule."""
    if kinds := config.get("layer_types"):
        return list(kinds)
    if kinds := _hybrid(config):
        return kinds
    n_layers, family = int(config["num_hidden_layers"]), families.of(config)
    wanted = config.get("use_sliding_window")
    if wanted is False or (family.windows in ("last", "unrotated") and not wanted):
        windowed = [False] * n_layers
    elif family.windows == "last":
        windowed = [index >= config.get("max_window_layers", 28) for index in range(n_layers)]
    elif family.windows == "every":
        every = config.get("sliding_window_pattern") or family.window_every
        windowed = [bool((index + 1) % every) for index in range(n_layers)]
    elif family.windows == "unrotated":
        windowed = [not rotated for rotated in config.get("no_rope_layers") or [1] * n_layers]
    else:
        windowed = [config.get("sliding_window") is not None] * n_layers
    return [SLIDING if each else FULL for each in windowed]
