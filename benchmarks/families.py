"""Which model families quantkit takes: small random models of each, through every kind of recipe.

    python benchmarks/families.py [FAMILY ...] [--recipes fp8-dynamic gptq-w4a16] [--gguf] [--again]
    python benchmarks/families.py --vllm PYTHON_OF_VLLM --work FOLDER [--jobs 8] [FAMILY ...]

Every family is built by transformers' own classes from its own config, made small; nothing comes
from a hub. Each recipe is quantised, verified against its source, and loaded back. The reference is
transformers itself: it loads a copy whose weights are dequantised, in the source's own layout, and
must give the logits of quantkit's reader. What its compressed-tensors integration reads from the
checkpoint itself is held against that copy parameter by parameter, in the model's own type. GGUF
files are read by real llama.cpp, whose log-probabilities must be those of quantkit's reader.
Results go to one file as they come, so that a stopped run goes on (`--again` starts anew). A family
that fails has its sentence there.
`scripts/write_models_page.py` makes docs/models.md of it.

The second form asks real vLLM on a GPU (see families_vllm.py).
"""

import argparse
import functools
import json
import platform
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from recording import write
from safetensors.torch import load_file, save_file

import quantkit
from quantkit import resources
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import versions
from quantkit.model import fused
from quantkit.model.shards import write_whole
from quantkit.model.source import ModelSource
from quantkit.onepass import estimate
from quantkit.recipe import Recipe
from quantkit.scoring import loading

RESULT = Path(__file__).parent / "results" / "families.json"
RECIPES = ("fp8-dynamic", "rtn-w4a16", "gptq-w4a16", "awq-gptq-w4a16", "int8-w8a8")
GGUF = "gguf-q8_0"
TEXT = """quantkit writes checkpoints that serving engines load. A small text is enough to calibrate
a model whose weights are random: what counts is that every layer is met, rounded and read back. """
KINDS = {
    "dense": "llama qwen2 qwen3 phi3 smollm3 olmo3 exaone4 seed_oss",
    "mixture of experts": "qwen3_moe glm4_moe deepseek_v3 glm4_moe_lite gpt_oss deepseek_v32 "
    "deepseek_v4 glm_moe_dsa minimax_m2 hy_v3 hunyuan_v1_moe ernie4_5_moe laguna mimo_v2",
    "hybrid": "qwen3_next nemotron_h granitemoehybrid lfm2 kimi_linear bailing_hybrid",
    "vision-language": "gemma3 qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe gemma4 llama4 "
    "muse_glimmer mistral3 kimi_k25 minimax_m3_vl glm4v_moe",
}
"""The forty families that people quantise most."""
BEYOND = {
    "dense": "mistral gpt2 gpt_neox gemma3n_text gemma4_text",
    "mixture of experts": "mixtral olmoe phimoe granitemoe lfm2_moe minimax qwen2_moe deepseek_v2",
    "hybrid": "zamba2 falcon_h1 jamba bamba",
    "vision-language": "qwen2_5_vl internvl smolvlm idefics3 llava gemma3n",
}
"""Others that are tried."""
CALLED = {"mimo_v2": "mimo_v2_flash"}
"""Families that transformers knows by another `model_type`."""

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "n_embd": 128,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "ffn_hidden_size": 256,
    "moe_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "moe_latent_size": None,
    "dense_intermediate_size": 256,
    "expert_ffn_hidden_size": 128,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "v_head_dim": 32,
    "qk_head_dim": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "sliding_window": 64,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_d_ssm": 256,
    "mamba_dt_rank": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "ssm_state_size": 16,
    "n_groups": 1,
    "hidden_size_per_layer_input": 32,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_scaling": None,
}
"""What configs get instead of their own values, where they have the key."""
SMALL_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "depth": 2,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "out_hidden_size": 128,
    "text_hidden_size": 128,
    "projection_dim": 64,
    "projector_dim": 64,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_position_embeddings": 64,
    "position_embedding_size": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "num_channels": 3,
}


@dataclass(frozen=True)
class Family:
    """How a family's config becomes small where the rules above do not do."""

    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    """Keys that the config works out from others."""


MLA = {"num_key_value_heads": 4}
# Enough heads that few scores are zero, and a width that llama.cpp takes.
SPARSE = MLA | {"num_hidden_layers": 3, "index_head_dim": 64, "index_n_heads": 8}
EVERY_FOURTH = {"num_hidden_layers": 4}
DEFAULT_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
GEMMA_3N = {
    "num_hidden_layers": 4,
    "vocab_size_per_layer_input": 4096,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    # 0.95 in real ones: of 512 tokens that leaves GPTQ less than a layer has columns.
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "laurel_rank": 16,
}
GEMMA_4 = {
    "num_hidden_layers": 6,
    "vocab_size_per_layer_input": 4096,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        MLA | {"q_lora_rank": 128, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    ),
    "deepseek_v3": Family(MLA),
    "deepseek_v32": Family(SPARSE),
    "deepseek_v4": Family(
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "layer_types": [
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 8,
            },
            "qk_rope_head_dim": 16,
            "partial_rotary_factor": 0.5,
            "sliding_window": 16,
        }
    ),
    "ernie4_5_moe": Family({"num_hidden_layers": 3, "moe_layer_end_index": 2}),
    "gemma3n": Family(GEMMA_3N),
    "gemma3n_text": Family(GEMMA_3N),
    "gemma4": Family(
        GEMMA_4,
        top={
            "vision_config": {
                "model_type": "gemma4_vision",
                **{key: SMALL_VISION[key] for key in ("hidden_size", "intermediate_size")},
                **{key: SMALL_VISION[key] for key in ("num_hidden_layers", "num_attention_heads")},
                **{key: SMALL_VISION[key] for key in ("num_key_value_heads", "head_dim")},
                "position_embedding_size": 64,
            }
        },
        drop=("per_layer_config",),
    ),
    "gemma4_text": Family(GEMMA_4, drop=("per_layer_config",)),
    "glm4_moe_lite": Family(MLA),
    "glm4v_moe": Family(
        {
            "rope_parameters": DEFAULT_ROPE
            | {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
        }
    ),
    "glm_moe_dsa": Family(SPARSE),
    "granitemoehybrid": Family({"layer_types": ["linear_attention", "full_attention"]}),
    "hunyuan_v1_moe": Family({"head_dim": 32, "rope_parameters": DEFAULT_ROPE}),
    "jamba": Family({"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "bailing_hybrid": Family(
        MLA
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts_per_token": 2,
            "num_expert_group": 1,
        }
    ),
    "bamba": Family({"attn_layer_indices": [1]}),
    "kimi_k25": Family(MLA, top={"tie_word_embeddings": False}),
    "kimi_linear": Family(
        MLA
        | {
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "num_experts_per_token": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        }
    ),
    "laguna": Family(drop=("num_attention_heads_per_layer",)),
    "lfm2": Family({"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "minimax_m3_vl": Family(
        {"layer_types": ["full_attention", "minimax_m3_sparse"]},
        top={"projector_hidden_size": 128, "merged_hidden_size": 512},
    ),
    "muse_glimmer": Family(top={"out_hidden_size": 128, "projector_hidden_size": 128}),
    "olmoe": Family({"num_key_value_heads": 4}),
    "nemotron_h": Family(
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        drop=("num_hidden_layers",),
    ),
    "qwen2_5_vl": Family({"rope_parameters": DEFAULT_ROPE | {"mrope_section": [4, 6, 6]}}),
    "qwen3_5": Family(EVERY_FOURTH),
    "qwen3_5_moe": Family(EVERY_FOURTH),
    "qwen3_moe": Family({"norm_topk_prob": True}),
    "qwen3_next": Family(EVERY_FOURTH),
    "zamba2": Family(
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "hybrid", "hybrid"],
            "hybrid_layer_ids": [1, 2],
            "attention_hidden_size": 256,
            "attention_head_dim": 64,
            "mamba_headdim": 32,
            "num_key_value_heads": 4,
        },
        drop=("kv_channels", "num_query_groups"),
    ),
}


def kinds() -> dict[str, str]:
    """Every family and its kind, in order."""
    return {
        name: kind
        for table in (KINDS, BEYOND)
        for kind, names in table.items()
        for name in names.split()
    }


def small_config(
    model_type: str, sizes: dict[str, Any] | None = None, own: Family | None = None
) -> Any:
    """The family's config with small numbers; every rule that it works out, works out anew."""
    from transformers import AutoConfig

    own = own or FAMILIES.get(model_type, Family())
    values = (sizes or SMALL) | {"vocab_size": len(_tokenizer())}
    kind = type(AutoConfig.for_model(model_type))
    default = kind().to_dict()
    top = _small(default, values, own.drop) | own.text
    for name, value in default.items():
        if isinstance(value, dict) and name.endswith("_config") and "model_type" in value:
            if name in ("text_config", "llm_config", "thinker_config"):
                top[name] = _small(value, values, own.drop) | own.text
            else:
                top[name] = _small(value, SMALL_VISION | own.vision, ())
    return kind(**(top | own.top))


ALWAYS_DROPPED = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "moe_layers",
    "layer_rope_theta",
    "rope_parameters",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "hybrid_layer_ids",
    "attn_layer_indices",
    "full_attn_idxs",
    "attention_layers",
    "indexer_types",
    "compress_ratios",
)


def _small(config: dict[str, Any], values: dict[str, Any], drop: tuple[str, ...]) -> dict[str, Any]:
    """A config's own keys with small values; null stays null."""
    result = {}
    for key, value in config.items():
        if key in ALWAYS_DROPPED or key in drop or key.startswith("_"):
            continue
        result[key] = values[key] if key in values and value is not None else value
    return result


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resources.DEMO_MODEL)


def build(
    model_type: str,
    folder: Path,
    sizes: dict[str, Any] | None = None,
    own: Family | None = None,
) -> Any:
    """A random model of the family in `folder`, with the demo's tokenizer."""
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import modeling_auto

    own = own or FAMILIES.get(model_type)
    model_type = CALLED.get(model_type, model_type)
    config = small_config(model_type, sizes, own)
    name = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    torch.manual_seed(0)
    if name is not None:
        model = getattr(transformers, name)(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    _spread(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    _add_unused(folder, config.get_text_config())
    for pattern in ("tokenizer*", "*.jinja", "special_tokens_map.json"):
        for path in resources.DEMO_MODEL.glob(pattern):
            shutil.copy(path, folder / path.name)
    return model


def _add_unused(folder: Path, config: Any) -> None:
    """Keys and values of layers that share another's: published files have them all the same."""
    path, n_layers = folder / "model.safetensors", config.num_hidden_layers
    first = n_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    tensors = load_file(path) if first < n_layers else {}
    for layer in range(first, n_layers):
        alike = (i for i in range(first) if config.layer_types[i] == config.layer_types[layer])
        donor = f".layers.{max(alike)}.self_attn."
        for name in [n for n in tensors if donor in n and UNUSED.search(n)]:
            unused = name.replace(donor, f".layers.{layer}.self_attn.")
            tensors.setdefault(unused, tensors[name].clone())
    if tensors:
        save_file(tensors, path, {"format": "pt"})


@torch.no_grad()
def _spread(model: torch.nn.Module) -> None:
    """Weights of a size that keeps signals alive through the blocks, and norms near one."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() and parameter.ndim == 1:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        elif parameter.ndim >= 2:
            width = parameter.shape[-1]
            # Random experts have nothing in common: where two weigh alike to a router, rounding
            # would choose between answers, and drown every other difference.
            scale = 0.25 if parameter.ndim == 3 and EXPERTS_LAST.search(name) else 1.0
            random = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale * random / width**0.5)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of a few tokens, in float32."""
    ids = torch.randint(1, 4000, (2, 24), generator=torch.Generator().manual_seed(2))
    found: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits.float()
    return found


def transformers_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers alone loads it."""
    return _by_transformers(folder, kind, dtype)[0]


def _by_transformers(folder: Path, kind: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The same, and what its loader says of names; inputs are not rounded."""
    import transformers

    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
    if "quantization_config" in json.loads((folder / "config.json").read_bytes()):
        arguments["quantization_config"] = transformers.CompressedTensorsConfig(
            run_compressed=False
        )
    own = getattr(transformers, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that arguments are added to the checkpoint's own
        model, told = own.from_pretrained(folder, output_loading_info=True, **arguments)
    for module in model.modules():
        module.__dict__.pop("forward", None)  # the library's, which rounds inputs
    return model, told


def own_loader(checkpoint: Checkpoint, copy: Path, kind: str) -> str:
    """What transformers itself makes of a checkpoint, against a dequantised copy of it.

    Both in bfloat16, as people load them, since its loader gives tensors that it renames the type
    that they have in files, whatever type is asked for.
    """
    expected, _ = _by_transformers(copy, kind, torch.bfloat16)
    joins = _joins_experts(expected)
    try:
        model, told = _by_transformers(checkpoint.folder, kind, torch.bfloat16)
    except Exception as error:  # another library's loader
        if "automatic conversion" in str(error):
            return f"refuses: {ONLY_PACKED if joins and is_int8(checkpoint) else NOT_JOINED}"
        if "ignore_mismatched_sizes" in str(error):
            return f"refuses: {NOT_JOINED}"
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return f"refuses: {type(error).__name__}: {reason}"
    if made_up := sorted(told["missing_keys"]):
        left = sorted(told["unexpected_keys"])
        words = f"makes up {made_up[0]}, since it does not read {left[0] if left else 'it'}"
        if all(".experts." in name for name in made_up):
            none = f"it has no rule to join experts of {kind} that are stored one by one"
            return f"{words}: {ONLY_PACKED if joins and is_int8(checkpoint) else none}"
        if all(name.endswith(".weight") for name in left):
            return f"{words}: of weights that it joins it reads packed ones only"
        return words
    found = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        # It may hold quantised experts in modules of their own (Llama 4), which logits judge.
        if name in found and not torch.equal(parameter, found[name]):
            return f"has another {name}"
    off = gap(logits(model.float()), logits(expected.float()))
    return SAME_WEIGHTS if off <= SAME else f"computes other logits (off by {off:.2g})"


def _joins_experts(model: Any) -> bool:
    """Whether transformers has a rule for this model's experts where they are stored one by one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    rules = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightConverter)]
    return any(
        re.search(r"experts\.(\*|\\d)", p) for r in rules for p in r._original_source_patterns
    )


def is_int8(checkpoint: Checkpoint) -> bool:
    """Whether weights are integers of a byte each: neither floats nor packed."""
    return any(tensor.dtype == "I8" for tensor in checkpoint.stored.values())


def dequantised_copy(checkpoint: Checkpoint, source: ModelSource, folder: Path) -> None:
    """What was written in 32 bits and in the source's own layout, as transformers loads it."""
    state = {name: tensor.clone() for name, tensor in checkpoint.state(torch.float32)}
    whole: dict[str, torch.Tensor] = {}
    for name in [name for name in state if name not in source.stored]:
        options = [o for o in fused.fused_names(name) if o[0] in source.stored]
        stored, index, layer, kind = options[0]
        part = state.pop(name)
        first = options[0][0].replace("down_proj", "gate_up_proj").replace("output_", "input_")
        up, down = (source.stored[n.removesuffix("_bias")].shape for n in (first, _down(first)))
        transposed = kind == "weight" and up[1:] == (down[2], 2 * down[1])
        rows = whole.setdefault(stored, torch.empty(source.stored[stored].shape))[index]
        rows = rows.t() if transposed else rows
        place, n_parts = ("gate_proj", "up_proj", "down_proj").index(layer), 2
        if layer == "down_proj":
            place, n_parts = 0, 1
        if n_parts == 2 and source.config["model_type"] in fused.ALTERNATING:
            rows[place::2] = part
        else:
            rows[place * len(part) : (place + 1) * len(part)] = part
    write_whole(folder / "model.safetensors", state | whole)
    (folder / "config.json").write_text(json.dumps(dict(source.config)), encoding="utf-8")


def _down(name: str) -> str:
    plain = name.removesuffix("_bias")
    return plain.replace("gate_up_proj", "down_proj").replace("input_linear", "output_linear")


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two logits over their spread."""
    return float((one - other).abs().max() / other.std())


def make(source: Path, recipes: Sequence[str | Recipe], out: Path) -> list[Checkpoint]:
    """Checkpoints of these recipes, from one pass."""
    out.mkdir(parents=True, exist_ok=True)
    text = out / "text.txt"
    text.write_text(TEXT * 60, encoding="utf-8")
    names = [recipe if isinstance(recipe, str) else recipe.name for recipe in recipes]
    needs = any(not name.startswith(("fp8-dynamic", "rtn", "gguf")) for name in names)
    return quantkit.quantize(
        source,
        recipes,
        out=out,
        calibration=text if needs else None,
        samples=8 if needs else None,
        length=64 if needs else None,
        device="cpu",
    )


def check(checkpoint: Checkpoint, source: Path, out: Path) -> dict[str, Any]:
    """Verify and load back; what went wrong, in the words that a user would read."""
    recipe = checkpoint.manifest.name
    found = quantkit.verify(checkpoint, source=source)
    result: dict[str, Any] = {
        "ok": found.ok,
        "n_layers": len(checkpoint.manifest.layers),
        "bits_per_weight": round(checkpoint.manifest.bits_per_weight, 2),
        "notes": checkpoint.manifest.notes,
    }
    if not found.ok:
        return result | {"reason": f"verify: {found.faults[0]}"}
    model = loading.load(checkpoint, torch.device("cpu"))
    ours = logits(model)
    if not ours.isfinite().all():
        return result | {"ok": False, "reason": "the logits of what was written are not finite"}
    if recipe.startswith("gguf"):
        off = off_in_llamacpp(checkpoint, model)
        if off > ALIKE:
            return result | {"ok": False, "reason": f"llama.cpp is off by {off:.2g}"}
        return result | {"llama.cpp": "the same log-probabilities"}
    kind = json.loads((source / "config.json").read_bytes())["architectures"][0]
    for module in model.modules():
        module._forward_pre_hooks.clear()  # inputs as they come
    copy = out / f"{recipe}-copy"
    copy.mkdir()
    dequantised_copy(checkpoint, ModelSource.open(str(source)), copy)
    off = gap(logits(transformers_model(copy, kind)), logits(model))
    result["reference"] = "the same logits" if off <= SAME else f"off by {off:.2g}"
    if off > SAME:
        return result | {"ok": False, "reason": f"transformers computes other logits ({off:.2g})"}
    return result | {"transformers": own_loader(checkpoint, copy, kind)}


@torch.no_grad()
def off_in_llamacpp(checkpoint: Checkpoint, model: Any) -> float:
    """Mean difference of log-probabilities between llama.cpp and quantkit's reader."""
    from quantkit.scoring.llamacpp import LlamaCpp

    ids = torch.randint(1, 4000, (24,), generator=torch.Generator().manual_seed(2))
    expected = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    expected = expected[:-1].gather(1, ids[1:, None])[:, 0]
    found: list[torch.Tensor] = []
    engine = LlamaCpp(checkpoint.gguf.path, 512, None)
    engine.echo_all([ids.tolist()], [23], lambda _, echo: found.append(torch.tensor(echo.own)))
    return float((found[0] - expected).abs().mean())


UNUSED = re.compile(r"\.(k_proj|v_proj|k_norm)\.")
EXPERTS_LAST = re.compile(r"\bdown_proj|\boutput_linear|\bw2\b")
"""Experts' last layers, all of a block in one tensor."""
ONLY_PACKED = "it joins experts in FP8 or packed, and not those in int8"
NOT_JOINED = "it fails where it joins some of these weights as it loads them"
SAME_WEIGHTS = "the same weights and logits"
SAME = 2e-2
"""Of the spread of logits: transformers' experts and ours add up in another order."""
ALIKE = 0.1
"""Of log-probabilities: llama.cpp rounds the inputs of quantised layers."""


def try_family(name: str, recipes: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """Build the family and try the recipes that are not known."""
    with tempfile.TemporaryDirectory(prefix=f"quantkit-{name}-") as scratch:
        source = Path(scratch) / name
        try:
            model = build(name, source)
        except Exception as error:  # transformers does not have it, or not with these numbers
            return {"built": False, "reason": " ".join(str(error).split())[:160]}
        result: dict[str, Any] = {"built": True, "class": type(model).__name__}
        kind = type(model).__name__
        del model
        try:
            ours = logits(loading.load(ModelSource.open(str(source)), torch.device("cpu")))
            off = gap(logits(transformers_model(source, kind)), ours)
            result["source"] = "the same logits" if off <= SAME else f"off by {off:.2g}"
        except Exception as error:
            result["source"] = words(error, source)
        tried = dict(known.get("recipes", {}))
        left = [recipe for recipe in recipes if recipe not in tried]
        try:
            made = make(source, left, Path(scratch) / "all")
        except Exception:  # which one it was shows below
            made = []
        by_name = {checkpoint.manifest.name: checkpoint for checkpoint in made}
        for recipe in left:
            out = Path(scratch) / recipe
            try:
                if recipe not in by_name:
                    (by_name[recipe],) = make(source, [recipe], out)
                tried[recipe] = check(by_name[recipe], source, Path(scratch))
            except Exception as error:
                tried[recipe] = {"ok": False, "reason": words(error, source)}
            loaded = tried[recipe].get("transformers", SAME_WEIGHTS)
            said = tried[recipe].get("reason", "" if loaded == SAME_WEIGHTS else loaded)
            print(f"{name} {recipe}: {'ok' if tried[recipe]['ok'] else 'MISS'} {said}", flush=True)
        return result | {"recipes": tried}


def words(error: Exception, folder: Path | None = None) -> str:
    """What a user would read, less where the model lay; anything but an error of ours is a bug."""
    said = " ".join(str(error).split())
    if folder is not None:
        said = said.replace(f"{folder}: ", "").replace(str(folder), "it")
    if isinstance(error, QuantkitError):
        return said
    if VERBOSE:
        traceback.print_exception(error)
    return f"bug: {type(error).__name__}: {said[:300]}"


VERBOSE = False


def has_gguf(name: str) -> bool:
    """Whether llama.cpp has the architecture, and quantkit writes it."""
    from quantkit.families import FAMILIES as records

    name = CALLED.get(name, name)
    return name in records and bool(records[name].llamacpp)


def _dated(found: dict[str, Any], before: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Results with versions that differ from most families': of all, or of those that are new."""
    old = before.get("recipes", {})
    if not old or not own:
        return found | ({"versions": own} if own else {})
    for recipe, result in found.get("recipes", {}).items():
        if recipe not in old:
            result["versions"] = own
    return found | {key: before[key] for key in ("versions",) if key in before}


def _in_vllm(arguments: argparse.Namespace) -> None:
    import families_vllm

    scratch = arguments.work or Path(tempfile.mkdtemp(prefix="quantkit-families-"))
    options = families_vllm.Options(
        arguments.vllm,
        scratch,
        arguments.out or families_vllm.RESULT,
        arguments.jobs,
        arguments.timeout,
        arguments.recipes,
        arguments.retry,
    )
    families_vllm.run(arguments.families or list(kinds()), options, arguments.again)


def main() -> None:
    global VERBOSE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--recipes", nargs="+", default=[*RECIPES])
    parser.add_argument("--gguf", action="store_true", help="gguf-q8_0 where it is written")
    parser.add_argument("--again", action="store_true", help="forget what was found before")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--out", type=Path)
    group = parser.add_argument_group("in vLLM, on a GPU")
    group.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python of vLLM's environment")
    group.add_argument("--work", type=Path, help="folder for models and checkpoints")
    group.add_argument("--jobs", type=int, default=8, help="engines at a time")
    group.add_argument("--timeout", type=float, default=120.0, help="seconds for one engine")
    group.add_argument("--retry", action="store_true", help="try again what did not agree")
    arguments = parser.parse_args()
    VERBOSE = arguments.verbose
    warnings.simplefilter("ignore")
    if arguments.vllm is not None:
        _in_vllm(arguments)
        return
    arguments.out = arguments.out or RESULT
    torch.set_num_threads(1)
    # The machine is as fast for every family.
    estimate.measured_speeds = functools.cache(estimate.measured_speeds)
    all_kinds = kinds()
    known: dict[str, Any] = {}
    used, own = versions(), {}  # of most families, and where these ones differ
    if arguments.out.is_file() and not arguments.again:
        stored = json.loads(arguments.out.read_text(encoding="utf-8"))
        known, others = stored["families"], stored["versions"]
        own = {key: value for key, value in used.items() if value != others.get(key)}
        used = others
    for name in arguments.families or all_kinds:
        before = known.get(name, {})
        recipes = [*arguments.recipes, *([GGUF] if arguments.gguf and has_gguf(name) else [])]
        if all(recipe in before.get("recipes", {}) for recipe in recipes):
            continue
        found = try_family(name, recipes, before)
        known[name] = {"kind": all_kinds[name], **_dated(found, before, own)}
        ordered = {n: known[n] for n in all_kinds if n in known}
        result = {
            "machine": f"{platform.machine()}, CPU",
            "versions": used,
            "families": ordered,
        }
        write(arguments.out, result)


if __name__ == "__main__":
    main()
