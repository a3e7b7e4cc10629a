"""Model families that llama.cpp runs, and how their configs map to its metadata keys.

The architecture's name fixes llama.cpp's graph, so a config that asks for something else (another
activation, another pattern of sliding windows) is refused here: the file would load and compute
something different. Each family's record holds what llama.cpp needs to know about it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import SourceError
from quantkit.families import FAMILIES, Family
from quantkit.families.geometry import FULL, SLIDING, head_dim, layer_types, n_kv_heads
from quantkit.gguf.names import MODEL_ARCH_NAMES, Keys, RopeScalingType
from quantkit.model.source import EXPERTS
from quantkit.quiet import only_errors

if TYPE_CHECKING:
    from quantkit.gguf.writer import Value

WRITTEN = {family.architecture: family for family in FAMILIES.values() if family.llamacpp}
"""Families by transformers class."""
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
"""Settings for how many experts a token takes."""
DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
"""Settings for how many blocks precede the first with experts."""
INDEXERS = "{arch}.attention.indexer.types"
"""Which blocks choose the tokens to read; others take the choice of the one before."""
HADAMARD = 64
"""llama.cpp rotates an indexer's columns in groups of so many."""
OF_EXPERTS = ("expert_", "moe_")
"""Beginnings of keys about experts."""
NORM_EPS = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")
UNNAMED = "the gguf package, whose names quantkit follows, has none for its tensors yet"
UNWRITTEN = {
    "PhimoeForCausalLM": "llama.cpp normalises the weights of a token's two experts to sum "
    "to one, while Phi-MoE's router gives each nearly one",
    "KimiLinearForCausalLM": "what llama.cpp computes for its linear attention was not compared "
    "with the model",
    **dict.fromkeys(
        (
            "DeepseekV4ForCausalLM",
            "HYV3ForCausalLM",
            "LagunaForCausalLM",
            "MiniMaxForCausalLM",
        ),
        UNNAMED,
    ),
}
"""MoE models that llama.cpp runs, and why no files of them are written."""
ARCHITECTURES = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}


def family_of(config: Mapping[str, Any], folder: Path) -> Family:
    """The family of a model; the error for an unknown one lists those that are supported."""
    names = config.get("architectures") or [str(config.get("model_type"))]
    family = WRITTEN.get(names[0])
    if reason := UNWRITTEN.get(names[0]):
        raise SourceError(
            f"{folder} is a {names[0]}, which GGUF output does not support: {reason}; quantise it "
            "in another format"
        )
    if family is None:
        raise SourceError(
            f"{folder} is a {names[0]}, which GGUF output does not support; llama.cpp's names for "
            f"what it does: {', '.join(sorted({each.llamacpp for each in WRITTEN.values()}))}"
        )
    return _variant(family, config)


def _variant(family: Family, config: Mapping[str, Any]) -> Family:
    """The architecture of llama.cpp for hybrids that lack one of their kinds of blocks."""
    if not family.state_space:
        return family
    kinds = block_kinds(config)
    if "mamba" in kinds:
        if family.llamacpp != "nemotron_h_moe" or "moe" in kinds:
            return family
        keys = {key: name for key, name in family.keys.items() if not key.startswith(OF_EXPERTS)}
        return replace(family, llamacpp="nemotron_h", experts="", keys=keys)
    alone = FAMILIES["granitemoeshared" if n_experts_of(config) else "granite"]
    return replace(alone, architecture=family.architecture)


def block_kinds(config: Mapping[str, Any]) -> list[str]:
    """What each block of a hybrid has, in one of the words that configs have used for it."""
    other = {"attention": FULL, "linear_attention": "mamba"}
    return [other.get(kind, kind) for kind in layer_types(config)]


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config with all defaults and renames that its class applies."""
    from transformers import AutoConfig

    from quantkit.model.source import native_class
    from quantkit.model.source import read_config as read_json

    try:
        own = native_class(read_json(folder))
        kind = AutoConfig if own is None else own.config_class
        with only_errors("transformers"):
            found = dict(kind.from_pretrained(folder).to_dict())
        if listed := found.get("layers_block_type"):  # Nemotron-H does not count them
            found.setdefault("num_hidden_layers", len(listed))
        return found
    except Exception as error:  # a config is untrusted input; anything may be wrong with it
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SourceError(f"transformers cannot read {folder / 'config.json'}: {reason}") from error


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of the full-attention blocks."""
    parameters = config.get("rope_parameters") or {}
    return dict(parameters.get("full_attention", parameters))


def rotary_dim(config: Mapping[str, Any]) -> int:
    """Rotated columns per head."""
    return int(head_dim(config) * rope_of(config).get("partial_rotary_factor", 1.0))


def metadata_of(family: Family, config: Mapping[str, Any], folder: Path) -> "dict[str, Value]":
    """The metadata keys of an architecture, once llama.cpp is known to compute what they say."""
    _check(family, config, folder)
    n_heads = config["num_attention_heads"]
    values: dict[str, Any] = {
        Keys.LLM.VOCAB_SIZE: config["vocab_size"],
        Keys.LLM.CONTEXT_LENGTH: _context(family, config),
        Keys.LLM.EMBEDDING_LENGTH: config["hidden_size"],
        Keys.LLM.BLOCK_COUNT: config["num_hidden_layers"],
        Keys.LLM.FEED_FORWARD_LENGTH: _feed_forward(family, config),
        Keys.Attention.HEAD_COUNT: n_heads,
        Keys.Attention.HEAD_COUNT_KV: _kv_heads(family, config),
        Keys.Attention.KEY_LENGTH: head_dim(config),
        Keys.Attention.VALUE_LENGTH: head_dim(config),
        Keys.Attention.LAYERNORM_RMS_EPS: float(_first(config, NORM_EPS)),
        Keys.Rope.DIMENSION_COUNT: rotary_dim(config),
    }
    if family.latent:
        values |= _latent(config)
    values |= _rope(family, config, folder)
    if family.experts and n_experts_of(config):
        values |= _experts(config)
    if family.state_space:  # its switch for rotation
        values[Keys.Rope.SCALING_FINETUNED] = config.get("position_embedding_type") == "rope"
    if family.dense_first:
        values[Keys.LLM.LEADING_DENSE_BLOCK_COUNT] = n_dense_of(config)
    values |= _own(family, config)
    if family.window_every or family.listed_windows:
        values[Keys.Attention.SLIDING_WINDOW] = config["sliding_window"]
    if family.listed_windows:
        listed = [int(kind == SLIDING) for kind in layer_types(config)]
        values[Keys.Attention.SLIDING_WINDOW_PATTERN] = listed
    if family.latent and (kinds := config.get("indexer_types")):
        values[INDEXERS] = [int(kind == "full") for kind in kinds]
    if family.capped:
        values[Keys.LLM.ATTN_LOGIT_SOFTCAPPING] = float(config["attn_logit_softcapping"])
        values[Keys.LLM.FINAL_LOGIT_SOFTCAPPING] = float(config["final_logit_softcapping"])
    if family.windowless:
        # Without this key, or with another value, llama.cpp treats the file as an older Phi.
        values[Keys.Attention.SLIDING_WINDOW] = 0
    if family.multiplied:
        values[Keys.Attention.SCALE] = float(config["attention_multiplier"])
        values[Keys.LLM.EMBEDDING_SCALE] = float(config["embedding_multiplier"])
        values[Keys.LLM.RESIDUAL_SCALE] = float(config["residual_multiplier"])
        values[Keys.LLM.LOGIT_SCALE] = float(config["logits_scaling"])
    return {key.format(arch=family.llamacpp): v for key, v in values.items()}


def n_experts_of(config: Mapping[str, Any]) -> int:
    """Experts per block; 0 for dense models."""
    return int(_first(config, EXPERTS) or 0)


def groups_of(config: Mapping[str, Any]) -> int:
    """Groups of a state-space layer's channels."""
    return int(_first(config, ("mamba_n_groups", "n_groups")) or 1)


def n_dense_of(config: Mapping[str, Any]) -> int:
    """Blocks before the first that has experts."""
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        return [*kinds, "sparse"].index("sparse")
    return int(_first(config, DENSE) or 0)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of several settings that a config has; where it lists one for every block, the
    first block's.
    """
    found = next((config[name] for name in names if config.get(name) is not None), None)
    return found[0] if isinstance(found, list) else found


def _kv_heads(family: Family, config: Mapping[str, Any]) -> int | list[int]:
    """Key heads of all blocks, or of each: llama.cpp knows those without attention by having
    none.
    """
    n = n_kv_heads(config)
    if family.listed_windows:
        return [2 * n if kind == SLIDING else n for kind in layer_types(config)]
    if not family.some_attention:
        return n
    return [n if kind == FULL else 0 for kind in block_kinds(config)]


def _feed_forward(family: Family, config: Mapping[str, Any]) -> int | list[int]:
    """Width of the MLPs, or of each where blocks are one of attention, state space and MLP."""
    width = int(config["intermediate_size"])
    if family.llamacpp.startswith("nemotron_h"):
        widths = {"mlp": width, "moe": int(config.get("moe_intermediate_size") or 0)}
        return [widths.get(kind, 0) for kind in block_kinds(config)]
    if config.get("shared_intermediate_size") and not n_experts_of(config):
        return int(config["shared_intermediate_size"])
    if config.get("block_auto_adjust_ff_dim"):  # LFM 2
        width = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = config["block_multiple_of"]
        return int(-(-width // multiple) * multiple)
    return width


def _own(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that only this architecture has, as far as the config has settings for them."""
    values: dict[str, Any] = {}
    for key, setting in family.keys.items():
        names = setting if isinstance(setting, tuple) else (setting,)
        parts = [_first(config, (name,)) if isinstance(name, str) else name for name in names]
        if all(part is not None for part in parts):
            value = parts[0] if len(parts) == 1 else math.prod(parts)
            values[f"{{arch}}.{key}"] = float(value) if key.endswith("_scale") else value
    return values


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    """Attention over latent vectors: to llama.cpp one wide key head, shared by all queries."""
    latent, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        Keys.Attention.HEAD_COUNT_KV: 1,
        Keys.Attention.Q_LORA_RANK: config.get("q_lora_rank") or 0,
        Keys.Attention.KV_LORA_RANK: latent,
        Keys.Attention.KEY_LENGTH: latent + rotated,
        Keys.Attention.VALUE_LENGTH: latent,
        Keys.Attention.KEY_LENGTH_MLA: config["qk_nope_head_dim"] + rotated,
        Keys.Attention.VALUE_LENGTH_MLA: config["v_head_dim"],
        Keys.Rope.DIMENSION_COUNT: rotated,
    }


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        Keys.LLM.EXPERT_COUNT: n_experts_of(config),
        Keys.LLM.EXPERT_USED_COUNT: _first(config, CHOSEN),
    }
    for key, name in (
        (Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, "moe_intermediate_size"),
        (Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, "shared_expert_intermediate_size"),
    ):
        if config.get(name):
            values[key] = config[name]
    if config.get("clip_qkv") is not None:
        values[Keys.Attention.CLAMP_KQV] = float(config["clip_qkv"])
    return values


def _context(family: Family, config: Mapping[str, Any]) -> int:
    """Context length up to which the file computes what the model computes.

    For some families that can use sliding windows llama.cpp has none and attends to everything; up
    to the window's size the result is the same.
    """
    window = config.get("sliding_window")
    has_windows = family.window_every or family.listed_windows
    if has_windows or not window or config.get("use_sliding_window") is False:
        return config["max_position_embeddings"]
    return min(window, config["max_position_embeddings"])


def _rope(family: Family, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    parameters = rope_of(config)
    if not parameters:
        return {}
    kind = parameters.get("rope_type", "default")
    longest = config["max_position_embeddings"]
    trained = int(
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or longest
    )
    values: dict[str, Any] = {Keys.Rope.FREQ_BASE: float(parameters["rope_theta"])}
    if local := (config.get("rope_parameters") or {}).get("sliding_attention"):
        values[Keys.Rope.FREQ_BASE_SWA] = float(local["rope_theta"])
    if kind == "linear":
        values[Keys.Rope.SCALING_TYPE] = RopeScalingType.LINEAR.value
        values[Keys.Rope.SCALING_FACTOR] = float(parameters["factor"])
    elif kind == "yarn":
        values[Keys.Rope.SCALING_TYPE] = RopeScalingType.YARN.value
        values[Keys.Rope.SCALING_FACTOR] = float(parameters["factor"])
        values[Keys.Rope.SCALING_ORIG_CTX_LEN] = trained
        usual = 0.1 * math.log(parameters["factor"]) + 1
        if family.latent:
            values |= _latent_yarn(parameters, folder)
        elif not math.isclose(parameters.get("attention_factor") or usual, usual, rel_tol=1e-3):
            raise SourceError(
                f"{folder} sets attention_factor in its rope_parameters, "
                "which llama.cpp computes itself; it can only be quantised in another format"
            )
        for key, name in (
            (Keys.Rope.SCALING_YARN_BETA_FAST, "beta_fast"),
            (Keys.Rope.SCALING_YARN_BETA_SLOW, "beta_slow"),
        ):
            if parameters.get(name) is not None:
                values[key] = float(parameters[name])
    elif kind == "longrope" and family.long_rope:
        scale = parameters.get("factor") or longest / trained
        usual = math.sqrt(1 + math.log(scale) / math.log(trained)) if scale > 1 else 1.0
        given = parameters.get("attention_factor")
        values[Keys.Rope.SCALING_ORIG_CTX_LEN] = trained
        values[Keys.Rope.SCALING_ATTN_FACTOR] = float(usual if given is None else given)
    elif kind == "dynamic" and family.fixed_ntk and parameters.get("alpha"):
        width = head_dim(config)
        values[Keys.Rope.FREQ_BASE] *= float(parameters["alpha"]) ** (width / (width - 2))
    elif kind not in ("default", "llama3"):
        raise SourceError(
            f"{folder} scales its rotary frequencies in a way that GGUF cannot express (rope_type "
            f"{kind}); it can only be quantised in another format"
        )
    return values


def _latent_yarn(parameters: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """DeepSeek's factor of the attention's scale; llama.cpp assumes that rotation has none."""
    scale = parameters.get("mscale_all_dim")
    if not scale or parameters.get("mscale") != scale or parameters.get("attention_factor"):
        raise SourceError(
            f"{folder} has another mscale than mscale_all_dim in its rope_parameters, which "
            "llama.cpp does not support; it can only be quantised in another format"
        )
    return {Keys.Rope.SCALING_YARN_LOG_MUL: 0.1 * scale}


def _unlike_experts(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """What is unusual about a block's experts or its router."""
    n_blocks, first = config["num_hidden_layers"], n_dense_of(config)
    kinds = config.get("mlp_layer_types")
    last = config.get("moe_layer_end_index")
    if (
        (kinds is not None and list(kinds) != ["dense"] * first + ["sparse"] * (n_blocks - first))
        or (first and not family.dense_first)
        or last not in (None, -1, n_blocks - 1)
    ):
        yield "blocks without experts after the first ones"
    step = config.get("interleave_moe_layer_step") or 1
    if list(config.get("moe_layers") or ()) not in ([], list(range(step - 1, n_blocks, step))):
        yield f"experts in blocks other than one in {step}"
    if family.unnormed_experts:
        is_normed = n_experts_of(config) != family.unnormed_experts
        if config.get("use_qk_norm", is_normed) != is_normed:
            yield f"use_qk_norm {config['use_qk_norm']}"
    for name in (*EXPERTS, *CHOSEN, "moe_intermediate_size"):
        if isinstance(listed := config.get(name), list) and len(set(listed)) > 1:
            yield f"{name} {listed}"


def _unlike_states(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """What is unusual about the blocks of a hybrid."""
    kinds = set(block_kinds(config))
    if {"moe", "mlp"} <= kinds:
        yield "MLPs both with and without experts"
    if unknown := sorted(kinds - {FULL, "mamba", "moe", "mlp"}):
        yield f"blocks of the kind {unknown[0]}"
    limits = tuple(config.get("time_step_limit") or (0.0, math.inf))
    if limits != (0.0, math.inf):
        yield f"time_step_limit {list(limits)}"


def _check(family: Family, config: Mapping[str, Any], folder: Path) -> None:
    """Refuse what llama.cpp's graph of this architecture would silently compute differently."""
    problems = []
    # A class without this setting has only one.
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation is not None and activation not in family.activations:
        problems.append(f"activation {activation}")
    if config.get("use_bidirectional_attention"):
        problems.append("bidirectional attention")
    kinds = config.get("layer_types")
    n_blocks = config["num_hidden_layers"]
    if every := family.window_every:
        known = [
            "full_attention" if index % every == every - 1 else "sliding_attention"
            for index in range(n_blocks)
        ]
        if kinds is not None and list(kinds) != known:
            problems.append(f"full attention in blocks other than one in {every}")
        wide = config["hidden_size"] / config["num_attention_heads"]
        scalar = wide if n_blocks == family.wide_blocks else head_dim(config)
        if config.get("query_pre_attn_scalar", scalar) != scalar:
            problems.append(f"query_pre_attn_scalar {config['query_pre_attn_scalar']}")
        caps = [config.get(f"{part}_logit_softcapping") for part in ("attn", "final")]
        if any(bool(cap) != family.capped for cap in caps):
            problems.append(f"soft-capping of attention and output at {caps}")
    if every := family.unrotated_every:
        rotated = [int((index + 1) % every != 0) for index in range(n_blocks)]
        if list(config.get("no_rope_layers") or rotated) != rotated:
            problems.append(f"no rotary embedding in blocks other than one in {every}")
    if every := family.full_every:
        known = [FULL if (i + 1) % every == 0 else "linear_attention" for i in range(n_blocks)]
        if layer_types(config) != known:
            problems.append(f"full attention in blocks other than one in {every}")
        if config["linear_key_head_dim"] != config["linear_value_head_dim"]:
            problems.append("linear attention with values wider or narrower than keys")
    if (config.get("index_head_dim") or 0) % HADAMARD:
        problems.append(f"index_head_dim {config['index_head_dim']}")
    if family.listed_windows and SLIDING not in layer_types(config):
        problems.append("no block with a window")
    turned = {
        part.get("partial_rotary_factor", 1.0)
        for part in (config.get("rope_parameters") or {}).values()
        if isinstance(part, dict)
    }
    if len(turned) > 1:
        problems.append("blocks with different partial_rotary_factor")
    if family.state_space:
        problems += _unlike_states(family, config)
    if config.get("position_embedding_type", "rope") != "rope" and not family.state_space:
        problems.append(f"position_embedding_type {config['position_embedding_type']}")
    if family.head_norms == "all" and n_kv_heads(config) != config["num_attention_heads"]:
        problems.append("fewer key heads than query heads")
    if family.experts:
        # A class without this key has only one behaviour.
        sums, sums_there = config.get("norm_topk_prob"), family.weights_sum_to_one
        if None not in (sums, sums_there) and sums != sums_there:
            problems.append(f"norm_topk_prob {sums}")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            problems.append("blocks without experts")
        problems += _unlike_experts(family, config)
    problems += [
        f"{name} {config[name]}"
        for name, value in family.fixed.items()
        if config.get(name) not in (None, value)
    ]
    if problems:
        raise SourceError(
            f"{folder} differs from the {family.llamacpp} models that llama.cpp supports "
            f"({'; '.join(problems)}), so llama.cpp would compute something else; quantise it in "
            "another format"
        )
