"""Bytes of one sequence in the KV cache, layer by layer, from the config.

A sliding-window layer keeps no more than its window; one with latent attention (DeepSeek V2 and V3)
keeps one compressed vector per token instead of keys and values of all heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import SourceError
from quantkit.families import geometry

FULL = ("full_attention", "attention", "global")
WINDOWED = ("sliding_attention", "chunked_attention", "local")


@dataclass(frozen=True)
class Layer:
    """What one layer keeps in the cache."""

    n_values: int
    """Numbers per token, on each GPU."""
    window: int | None = None
    """Most tokens it keeps; None: all."""

    def values(self, context: int) -> int:
        """Numbers for a sequence of this length."""
        return self.n_values * (context if self.window is None else min(context, self.window))


def bytes_for(config: Mapping[str, Any], context: int, kv_bits: int = 16, n_gpus: int = 1) -> int:
    """Bytes for one sequence of `context` tokens, on each GPU of a tensor-parallel group."""
    return sum(layer.values(context) for layer in layers(config, n_gpus)) * kv_bits // 8


def layers(config: Mapping[str, Any], n_gpus: int = 1) -> list[Layer]:
    """All layers that keep keys and values of their own, in order."""
    n_values = _values_per_token(config, n_gpus)
    return [Layer(n_values, window) for window in _windows(config)]


def _values_per_token(config: Mapping[str, Any], n_gpus: int) -> int:
    try:
        if rank := config.get("kv_lora_rank"):
            # not per head, so every GPU holds all of it
            return int(rank + config["qk_rope_head_dim"])
        n_kv, head_dim = geometry.n_kv_heads(config), geometry.head_dim(config)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SourceError(
            f"the config does not say how large keys and values are: {error}"
        ) from error
    return 2 * -(-n_kv // n_gpus) * head_dim  # fewer heads than GPUs: each has a copy


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    kinds = geometry.layer_types(config)
    if shared := config.get("num_kv_shared_layers"):
        kinds = kinds[:-shared]  # the last ones reuse an earlier one's
    sizes = {
        "sliding_attention": config.get("sliding_window"),
        "local": config.get("sliding_window"),
        "chunked_attention": config.get("attention_chunk_size"),
    }
    for kind in kinds:
        if kind not in FULL + WINDOWED:
            raise SourceError(
                f"the config has layers of kind {kind}, whose cache size is unknown; "
                f"known: {', '.join(FULL + WINDOWED)}"
            )
    return [sizes.get(kind) for kind in kinds]
