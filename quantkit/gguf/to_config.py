"""The `config.json` that a GGUF file's keys stand for: the inverse of `families.metadata_of`.

A file says less than a config, so the caller derives the file's keys from the result again and
compares (`source.py`): what has no setting here is refused there, never guessed.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import Keys

from quantkit.errors import SourceError
from quantkit.families import FAMILIES, Family, geometry
from quantkit.families.record import MULTIPLIERS
from quantkit.gguf.layout import llama3_factors
from quantkit.gguf.reader import GGUF

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The setting of every Llama since 3.1; the factor is read from the file's tensor."""
TRAINED = 8192
MULTIPLIER_KEYS = (
    Keys.Attention.SCALE, Keys.LLM.EMBEDDING_SCALE, Keys.LLM.RESIDUAL_SCALE, Keys.LLM.LOGIT_SCALE,
)  # fmt: skip
IDS = {
    "bos_token_id": Keys.Tokenizer.BOS_ID,
    "eos_token_id": Keys.Tokenizer.EOS_ID,
    "pad_token_id": Keys.Tokenizer.PAD_ID,
}


def config_of(file: GGUF, dtype: str) -> dict[str, Any]:
    """A transformers config for a file whose tensors will have the type `dtype`."""
    model_type, family = family_of(file)
    keys = _Keys(file, family)
    hidden, heads = keys.number(Keys.LLM.EMBEDDING_LENGTH), keys.number(Keys.Attention.HEAD_COUNT)
    # llama.cpp's default where a file does not say, for every family.
    even = geometry.head_dim({"hidden_size": hidden, "num_attention_heads": max(heads, 1)})
    head_dim = keys.number(Keys.Attention.KEY_LENGTH, even)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "torch_dtype": dtype,
        "vocab_size": _shape(file, EMBEDDING)[0],
        "hidden_size": hidden,
        "intermediate_size": keys.number(Keys.LLM.FEED_FORWARD_LENGTH),
        "num_hidden_layers": keys.number(Keys.LLM.BLOCK_COUNT),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number(Keys.Attention.HEAD_COUNT_KV, heads),
        "max_position_embeddings": keys.number(Keys.LLM.CONTEXT_LENGTH),
        "rms_norm_eps": keys.real(Keys.Attention.LAYERNORM_RMS_EPS),
        "tie_word_embeddings": HEAD not in file.tensors,
        **{name: file.metadata.get(key) for name, key in IDS.items()},
    }
    if not family.packed:
        config["head_dim"] = head_dim
    activation = "hidden_activation" if family.shifted_norms else "hidden_act"
    config[activation] = family.activations[0]
    config |= _biases(file, model_type) | _rope(file, keys, config, head_dim)
    if family.experts:
        config |= _experts(file, keys, family, model_type)
    if family.window_every:
        is_wide = config["num_hidden_layers"] == family.wide_blocks
        config["query_pre_attn_scalar"] = even if is_wide else head_dim
        config["sliding_window"] = keys.number(Keys.Attention.SLIDING_WINDOW)
    if family.capped:
        config["attn_logit_softcapping"] = keys.real(Keys.LLM.ATTN_LOGIT_SOFTCAPPING)
        config["final_logit_softcapping"] = keys.real(Keys.LLM.FINAL_LOGIT_SOFTCAPPING)
    if family.multiplied:
        config |= {
            name: keys.real(key) for name, key in zip(MULTIPLIERS, MULTIPLIER_KEYS, strict=True)
        }
    return config


def family_of(file: GGUF) -> tuple[str, Family]:
    """The family of a file: llama.cpp uses one name for Llama, Mistral and Mixtral."""
    architecture = str(file.metadata.get(Keys.General.ARCHITECTURE))
    is_moe = Keys.LLM.EXPERT_COUNT.format(arch=architecture) in file.metadata
    for model_type, family in FAMILIES.items():
        if not family.readable:
            continue
        if family.llamacpp == architecture and bool(family.experts) == is_moe:
            return model_type, family
    readable = (family for family in FAMILIES.values() if family.readable)
    known = sorted({family.llamacpp for family in readable if family.llamacpp})
    raise SourceError(
        f"{file.path} is of architecture {architecture}, which quantkit cannot write as a model "
        f"folder; give the model that it was made from, or a file of one of: {', '.join(known)}"
    )


class _Keys:
    """Keys of the file's architecture."""

    def __init__(self, file: GGUF, family: Family) -> None:
        self._file, self._family = file, family

    def get(self, key: str) -> Any:
        return self._file.metadata.get(key.format(arch=self._family.llamacpp))

    def number(self, key: str, default: int | None = None) -> int:
        found = self.get(key)
        if found is None and default is not None:
            return default
        if type(found) is not int or found < 0:
            self._refuse(key, found)
        return int(found)

    def real(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal number that stands for it."""
        found = self.get(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, float) or not math.isfinite(found):
            self._refuse(key, found)
        return float(str(np.float32(found)))

    def _refuse(self, key: str, found: Any) -> None:
        name = key.format(arch=self._family.llamacpp)
        what = f"lacks {name}" if found is None else f"has {name} {str(found)[:60]}"
        raise SourceError(
            f"{self._file.path} {what}, so no config can be derived; give the model that it "
            "was made from"
        )


def _shape(file: GGUF, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise SourceError(f"{file.path} lacks {name}; copy or download it again")
    return file.tensors[name].shape


def _biases(file: GGUF, model_type: str) -> dict[str, Any]:
    """Settings for biases; a class that always or never has biases ignores them."""
    settings = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}
    if model_type == "seed_oss":
        settings["attention_out_bias"] = "blk.0.attn_output.bias"
    return {name: tensor in file.tensors for name, tensor in settings.items()}


def _rope(file: GGUF, keys: _Keys, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": keys.real(Keys.Rope.FREQ_BASE, 10_000.0)}
    if config["model_type"] == "gemma3_text":
        found["rope_local_base_freq"] = keys.real(Keys.Rope.FREQ_BASE_SWA, 10_000.0)
    rotated = keys.number(Keys.Rope.DIMENSION_COUNT, head_dim)
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind = keys.get(Keys.Rope.SCALING_TYPE)
    if kind in ("linear", "yarn"):
        scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.real(Keys.Rope.SCALING_FACTOR)}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = keys.number(
                Keys.Rope.SCALING_ORIG_CTX_LEN, config["max_position_embeddings"]
            )
            for key, name in (
                (Keys.Rope.SCALING_YARN_BETA_FAST, "beta_fast"),
                (Keys.Rope.SCALING_YARN_BETA_SLOW, "beta_slow"),
            ):
                if keys.get(key) is not None:
                    scaling[name] = keys.real(key)
        found["rope_scaling"] = scaling
    elif kind not in (None, "none", "longrope"):
        raise SourceError(
            f"{file.path} scales its rotary frequencies by {kind}, for which quantkit knows no "
            "setting; give the model that it was made from"
        )
    if "rope_freqs.weight" in file.tensors:
        found["rope_scaling"] = _llama3(file, found["rope_theta"], rotated)
    if "rope_factors_long.weight" in file.tensors:
        found |= _long(file, keys, config)
    return found


def _llama3(file: GGUF, theta: float, n_columns: int) -> dict[str, Any]:
    """Settings that yield the file's factors; the slowest frequency is divided by all of it."""
    factors = file.dequantized("rope_freqs.weight")
    known = LLAMA_3 | {"factor": float(factors.max()), "rope_theta": theta}
    # Published models have the first; others were trained for what they state.
    for trained in (TRAINED, *(1 << n for n in range(5, 21))):
        settings = known | {"original_max_position_embeddings": trained}
        made = llama3_factors(settings, n_columns)
        if made.shape == factors.shape and torch.allclose(made, factors, rtol=1e-4):
            del settings["rope_theta"]
            return {"rope_type": "llama3", **settings}
    raise SourceError(
        f"{file.path} divides its rotary frequencies by factors (rope_freqs.weight) that Llama "
        "does not have; give the model that it was made from"
    )


def _long(file: GGUF, keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Phi's factors for short and long contexts."""
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for part in ("long", "short"):
        name = f"rope_factors_{part}.weight"
        _shape(file, name)
        values = file.dequantized(name).tolist()
        scaling[f"{part}_factor"] = [float(str(np.float32(value))) for value in values]
    longest = config["max_position_embeddings"]
    trained = keys.number(Keys.Rope.SCALING_ORIG_CTX_LEN, longest)
    ratio = longest / trained
    usual = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
    given = keys.real(Keys.Rope.SCALING_ATTN_FACTOR, usual)
    if not math.isclose(given, usual, rel_tol=1e-5):
        scaling["attention_factor"] = given
    return {"rope_scaling": scaling, "original_max_position_embeddings": trained}


def _experts(file: GGUF, keys: _Keys, family: Family, model_type: str) -> dict[str, Any]:
    n_experts = keys.number(Keys.LLM.EXPERT_COUNT)
    found: dict[str, Any] = {
        "num_local_experts" if family.mlp_parts[0] == "w1" else "num_experts": n_experts,
        "num_experts_per_tok": keys.number(Keys.LLM.EXPERT_USED_COUNT),
        "norm_topk_prob": family.weights_sum_to_one,
    }
    if model_type.startswith("qwen"):
        found |= {
            "moe_intermediate_size": _shape(file, "blk.0.ffn_gate_exps.weight")[1],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if "blk.0.ffn_gate_shexp.weight" in file.tensors:
        shared = _shape(file, "blk.0.ffn_gate_shexp.weight")[0]
        found["shared_expert_intermediate_size"] = shared
    if keys.get(Keys.Attention.CLAMP_KQV) is not None:
        found["clip_qkv"] = keys.real(Keys.Attention.CLAMP_KQV)
    return found
