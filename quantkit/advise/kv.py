"""Bytes of one sequence in the KV cache, layer by layer, from the config.

A sliding-window layer keeps no more than its window; one with latent attention (DeepSeek V2 and V3)
keeps one compressed vector per token instead of keys and values of all heads. DeepSeek V4 keeps a
window, and beyond it one vector for every few tokens. Linear attention, state-space and convolution
layers keep a state whose size does not depend on the context.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import SourceError
from quantkit.families import geometry

FULL = ("full_attention", "attention", "global", "hybrid", "minimax_m3_sparse")
WINDOWED = ("sliding_attention", "chunked_attention", "local")
RECURRENT = ("linear_attention", "mamba", "conv")
COMPRESSED = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Layers that keep one vector for this many tokens, if the config does not say (DeepSeek V4)."""
WITHOUT = ("moe", "mlp")
"""Layers that keep nothing (Nemotron-H)."""
WIDE = 2
"""A state's numbers count this often: engines keep it in 32 bits where the cache has 16."""


@dataclass(frozen=True)
class Layer:
    """What one layer keeps in the cache."""

    n_values: int
    """Numbers per token, on each GPU."""
    window: int | None = None
    """Most tokens it keeps; None: all."""
    n_compressed: int = 0
    """Numbers of every vector that stands for several tokens."""
    rate: int = 1
    """How many tokens that is."""

    def values(self, context: int) -> int:
        """Numbers for a sequence of this length."""
        kept = self.n_values * (context if self.window is None else min(context, self.window))
        return kept + self.n_compressed * (context // self.rate)

    def attended(self, context: int) -> int:
        """Entries that the last token of such a sequence attends to."""
        kept = min(context, self.window or context)
        return kept + (context // self.rate if self.n_compressed else 0)


def bytes_for(config: Mapping[str, Any], context: int, kv_bits: int = 16, n_gpus: int = 1) -> int:
    """Bytes for one sequence of `context` tokens, on each GPU of a tensor-parallel group."""
    return sum(layer.values(context) for layer in layers(config, n_gpus)) * kv_bits // 8


def layers(config: Mapping[str, Any], n_gpus: int = 1) -> list[Layer]:
    """All layers that keep keys and values of their own, in order."""
    n_values = _values_per_token(config, n_gpus)
    found = []
    for kind, window in _windows(config):
        if kind in RECURRENT:  # as if it kept one token
            found.append(Layer(WIDE * -(-_state(config, kind) // n_gpus), 1))
        elif kind in COMPRESSED:
            found.append(_compressed(config, kind))
        else:
            found.append(Layer(0, 1) if kind in WITHOUT else Layer(n_values, window))
    return found


def _compressed(config: Mapping[str, Any], kind: str) -> Layer:
    """One head, whose keys are its values, on every GPU; sparse layers also keep an index."""
    rates = config.get("compress_rates") or COMPRESSED
    wide, window = geometry.head_dim(config), config.get("sliding_window")
    index = config.get("index_head_dim") or 0 if kind == "compressed_sparse_attention" else 0
    return Layer(wide, window, wide + index, int(rates.get(kind) or COMPRESSED[kind]))


def _state(config: Mapping[str, Any], kind: str) -> int:
    """Numbers that a recurrent layer keeps of a sequence, by the keys that its config has."""

    def size(*keys: str) -> int:
        return next((int(config[key]) for key in keys if config.get(key)), 0)

    try:
        hidden, taps = int(config["hidden_size"]), size("linear_conv_kernel_dim", "conv_kernel")
        if kind == "conv":
            return hidden * (size("conv_L_cache") or 3)
        if heads := size("linear_num_value_heads"):
            key, value = size("linear_key_head_dim"), size("linear_value_head_dim")
            mixed = 2 * size("linear_num_key_heads") * key + heads * value
            return heads * key * value + mixed * (taps or 4)
        kda = config.get("linear_attn_config") or {}
        if heads := size("linear_num_heads") or int(kda.get("num_heads") or 0):
            wide = size("linear_head_dim") or int(kda.get("head_dim") or 0)
            return heads * wide * (wide + 3 * (taps or 4))
        if states := size("mamba_d_state", "ssm_state_size", "state_size"):
            heads = size("mamba_n_heads", "mamba_num_heads")
            wide = heads * size("mamba_d_head", "mamba_head_dim")
            wide = wide or (size("mamba_expand", "expand") or 2) * hidden
            mixed = wide + 2 * (size("mamba_n_groups", "n_groups") or 1) * states
            return wide * states + mixed * (size("mamba_d_conv") or taps or 4)
        return int(config["num_attention_heads"]) * geometry.head_dim(config) ** 2  # MiniMax
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"the config does not say how large the state of {kind} layers is: {error}"
        ) from error


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


def _windows(config: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """The kind of every layer, and the window that it has."""
    kinds = geometry.layer_types(config)
    if shared := config.get("num_kv_shared_layers"):
        kinds = kinds[:-shared]  # the last ones reuse an earlier one's
    sizes = {
        "sliding_attention": config.get("sliding_window"),
        "local": config.get("sliding_window"),
        "chunked_attention": config.get("attention_chunk_size"),
    }
    for kind in kinds:
        if kind not in (*FULL, *WINDOWED, *RECURRENT, *WITHOUT, *COMPRESSED):
            raise SourceError(
                f"the config has layers of kind {kind}, whose cache size is unknown; "
                f"known: {', '.join((*FULL, *WINDOWED, *RECURRENT, *COMPRESSED))}"
            )
    return [(kind, sizes.get(kind)) for kind in kinds]
