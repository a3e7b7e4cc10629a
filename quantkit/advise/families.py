"""Tensors of a model from its config alone, by formulas, for families that have a record.

No transformers class is built, so this needs no torch and takes no time. Missing settings are those
of the family's transformers class.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from quantkit import families
from quantkit.errors import SourceError
from quantkit.families import FAMILIES, Family, geometry
from quantkit.model.source import EXPERTS

NEEDED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip


NATURAL = (
    *NEEDED, "num_key_value_heads", "head_dim", "sliding_window", "attention_chunk_size",
    "kv_lora_rank", "qk_rope_head_dim", "num_kv_shared_layers", "max_window_layers",
    "sliding_window_pattern", "max_position_embeddings", *EXPERTS, "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step",
)  # fmt: skip
MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000
"""Most experts of all layers together."""


def completed(config: Mapping[str, Any], label: str = "the model") -> dict[str, Any]:
    """A config with the defaults of its transformers class, as far as sizes depend on them.

    For an unknown family, only what holds for all classes. A config is untrusted input: invalid
    numbers are refused here, so no other code has to check.
    """
    _check(config, label)
    family = families.of(config)
    result = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, **family.defaults, **config}
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0:
        result["num_key_value_heads"] = geometry.n_kv_heads(config)
        if config.get("head_dim") or config.get("hidden_size"):
            result["head_dim"] = geometry.head_dim(config)
    if config.get("tie_word_embeddings") is None:
        result["tie_word_embeddings"] = family.tied
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    # The key's older name, and the places where it used to be.
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope["type"]
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    result["rope_parameters"] = rope
    return result


def _check(config: Mapping[str, Any], label: str) -> None:
    wrong = [
        key
        for key in NATURAL
        if (value := config.get(key)) is not None
        and (type(value) is not int or not 0 <= value < 1 << 31)
    ]
    wrong += [
        key
        for key in ("rope_parameters", "rope_scaling")
        if not isinstance(config.get(key) or {}, Mapping)
    ]
    kinds = config.get("layer_types")
    if kinds and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        wrong.append("layer_types")
    dense = config.get("mlp_only_layers") or []
    if not (isinstance(dense, list) and all(type(index) is int for index in dense)):
        wrong.append("mlp_only_layers")
    n_layers = 0 if wrong else config.get("num_hidden_layers") or 0
    if n_layers > MOST_LAYERS:
        wrong.append("num_hidden_layers")
    elif not wrong and n_layers * n_experts(config) > MOST_EXPERTS:
        wrong.append("number of experts")
    if wrong:
        raise SourceError(f"{label}: the config has no usable {', '.join(wrong)}")


def require(config: Mapping[str, Any], keys: tuple[str, ...], label: str) -> None:
    """Refuse a config in which a number is missing or unusable."""
    if missing := [key for key in keys if not config.get(key)]:
        raise SourceError(f"{label}: the config has no usable {', '.join(missing)}")


def shapes(
    config: Mapping[str, Any], label: str, only_first: bool = False
) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this `completed` config stores, in the model's order.

    `only_first` leaves out all experts of a block but the first; the others are like it.
    """
    kind = str(config.get("model_type"))
    known = [name for name, family in FAMILIES.items() if family.formulas]
    if kind not in known:
        raise SourceError(
            f"{label} belongs to a family whose shapes do not follow from the config alone "
            f"({kind}; known: {', '.join(known)}); give a folder with the weights"
        )
    require(config, (*NEEDED, "head_dim"), label)
    if FAMILIES[kind].experts and not n_experts(config):
        raise SourceError(f"{label}: the config has no usable number of experts")
    hidden = config["hidden_size"]
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for index in range(config["num_hidden_layers"]):
        for name, shape in _block(FAMILIES[kind], config, index, only_first):
            result[f"model.layers.{index}.{name}"] = shape
    result["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    return result


def _block(
    family: Family, config: Mapping[str, Any], index: int, only_first: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    has_bias = bool(config.get("attention_bias"))
    into = has_bias if family.attention_bias is None else family.attention_bias
    out = has_bias if family.attention_bias is None else False
    mlp = bool(config.get("mlp_bias")) and family.mlp_bias
    if family.packed:
        rows = {"self_attn.qkv_proj": queries + 2 * keys, "mlp.gate_up_proj": 2 * inner}
    else:
        rows = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        rows |= {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    linears = {name: (n, hidden) for name, n in rows.items()}
    linears |= {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, inner)}
    if family.experts and _is_mixed(config, index):
        linears = {name: shape for name, shape in linears.items() if not name.startswith("mlp.")}
        linears |= _experts(family, config, only_first)
    for name, shape in linears.items():
        yield f"{name}.weight", shape
        if mlp if name.startswith("mlp") else out if name.endswith("o_proj") else into:
            yield f"{name}.bias", shape[:1]
    for name in family.norms:
        yield f"{name}.weight", (hidden,)
    if family.head_norms:
        wide = family.head_norms == "all"
        yield "self_attn.q_norm.weight", (queries if wide else head,)
        yield "self_attn.k_norm.weight", (keys if wide else head,)


def n_experts(config: Mapping[str, Any]) -> int:
    """Experts of a block; 0 in a dense model."""
    return int(next((config[key] for key in EXPERTS if config.get(key)), 0))


def _is_mixed(config: Mapping[str, Any], index: int) -> bool:
    """Whether a block has experts; in some configs every n-th block is dense."""
    step = config.get("decoder_sparse_step") or 1
    return index not in (config.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def _experts(
    family: Family, config: Mapping[str, Any], only_first: bool
) -> dict[str, tuple[int, int]]:
    hidden, place = config["hidden_size"], family.experts
    n = n_experts(config)
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    found = {f"{place}.gate": (n, hidden)}
    for prefix, width in (
        *((f"{place}.experts.{number}", inner) for number in range(1 if only_first else n)),
        (f"{place}.shared_expert", config.get("shared_expert_intermediate_size") or 0),
    ):
        if width:
            gate, up, down = family.mlp_parts
            found |= {f"{prefix}.{part}": (width, hidden) for part in (gate, up)}
            found[f"{prefix}.{down}"] = (hidden, width)
    if config.get("shared_expert_intermediate_size"):
        found[f"{place}.shared_expert_gate"] = (1, hidden)
    return found
