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


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """Attention type of every layer, from the config's list or its family's rule."""
    if kinds := config.get("layer_types"):
        return list(kinds)
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
