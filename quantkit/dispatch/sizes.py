"""Checks a config against its files: sizes, blocks, heads, cache scales."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.dispatch.layers import BLOCK, VISION
from quantkit.dispatch.rules import Finding, finding
from quantkit.dispatch.schemes import Judged, scheme_of
from quantkit.families import geometry


def cache(judged: Judged) -> Iterator[Finding]:
    scheme = judged.section.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return
    fits = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    fits = fits and scheme.get("strategy") in ("tensor", "attn_head")
    if judged.method == "compressed-tensors" and not (fits and scheme.get("symmetric")):
        words = " ".join(str(scheme.get(k)) for k in ("type", "num_bits", "strategy"))
        yield finding("kv-scheme", "kv_cache_scheme", words)
    elif not any(name.endswith(("k_scale", "output_scale")) for name in judged.checkpoint.tensors):
        yield finding("kv-scales", "kv_cache_scheme", "no k_scale is stored")


def heads(judged: Judged) -> Iterator[Finding]:
    text = judged.checkpoint.text
    n = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0
    blocks = int(text.get("num_hidden_layers") or 0)
    if not n:
        return
    for name in judged.checkpoint.tensors:
        match = BLOCK.match(name)
        if name.startswith("mtp.") or ".mtp." in name or (match and int(match["index"]) >= blocks):
            return
    yield finding("mtp", "config.json", f"{n} such layers are declared, none is stored")


HEADS_APART = (
    "per_layer_config", "global_head_dim", "attention_head_dim", "swa_head_dim",
    "num_attention_heads_per_layer",
)  # fmt: skip
"""Keys of configs whose attention layers vary in size, or differ from the usual one."""


def _is_gated(text: Mapping[str, Any]) -> bool:
    """Whether q_proj also computes a gate although the config does not say so."""
    return str(text.get("model_type")).startswith(("qwen3_next", "qwen3_5"))


def model(judged: Judged) -> Iterator[Finding]:
    """Sizes in config.json against those in the files."""
    text, tensors = judged.checkpoint.text, judged.checkpoint.tensors
    hidden, vocabulary = text.get("hidden_size"), text.get("vocab_size")
    for name, spec in tensors.items():
        if name.endswith("embed_tokens.weight") and not VISION.search(name):
            if hidden and len(spec.shape) == 2 and spec.shape[1] != hidden:
                words = f"{list(spec.shape)}, config.json has hidden_size {hidden}"
                yield finding("config-shape", name, words)
            elif vocabulary and spec.shape[0] != vocabulary:
                words = f"{list(spec.shape)}, config.json has vocab_size {vocabulary}"
                yield finding("config-shape", name, words)
    wanted: dict[str, int] = {}
    is_usual_head = bool(hidden or text.get("head_dim")) and not any(map(text.get, HEADS_APART))
    if text.get("num_attention_heads") and is_usual_head:
        width = geometry.head_dim(text)
        wanted["q_proj"] = int(text["num_attention_heads"]) * width
        wanted["k_proj"] = geometry.n_kv_heads(text) * width
    if isinstance(text.get("intermediate_size"), int):
        wanted["gate_proj"] = text["intermediate_size"]
    blocks: set[int] = set()
    reported: set[str] = set()
    for name, layer in judged.checkpoint.linears.items():
        if VISION.search(name) or not (match := BLOCK.match(name)):
            continue
        blocks.add(int(match["index"]))
        last = name.rpartition(".")[2]
        is_usual = name.endswith((".self_attn.q_proj", ".self_attn.k_proj", ".mlp.gate_proj"))
        size = wanted.get(last)
        if not size or not is_usual or last in reported or "q_lora_rank" in text:
            continue
        scheme = scheme_of(judged, name)
        rows, _ = layer.shape(scheme.bits if scheme else 8, judged.method == "awq")
        gated = last == "q_proj" and text.get("attn_output_gate", _is_gated(text))
        if rows and rows != size * (2 if gated else 1) and last != "gate_proj":
            reported.add(last)
            yield finding("config-shape", name, f"{rows} rows, config.json gives {size}")
        elif rows and last == "gate_proj" and rows != size:
            reported.add(last)
            yield finding("config-shape", name, f"{rows} rows, intermediate_size is {size}")
    n_blocks = int(text.get("num_hidden_layers") or 0)
    mtp = int(text.get("num_nextn_predict_layers") or 0)
    if blocks and n_blocks:
        if gone := sorted(set(range(n_blocks)) - blocks):
            words = f"config.json has {n_blocks} blocks, block {gone[0]} has no tensors"
            yield finding("missing-layer", f"layers.{gone[0]}", words)
        if max(blocks) >= n_blocks + mtp:
            words = f"block {max(blocks)} is stored, config.json has {n_blocks}"
            yield finding("config-shape", f"layers.{max(blocks)}", words)
