"""GGUF files as other tools write them: by the package gguf itself, without a line of ours."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from quantkit.model.source import read_tensors

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def write_llama(
    source: Path, path: Path, kind: str = "Q8_0", maker: str | None = "somebody", **other: Any
) -> Path:
    """A Llama with its matrices in one type of ggml, as convert_hf_to_gguf lays it out.

    `other` replaces keys of the config, for a file of another model.
    """
    config = json.loads((source / "config.json").read_bytes()) | other
    writer = gguf.GGUFWriter(str(path), "llama")
    if maker is not None:
        writer.add_quantized_by(maker)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokens(writer, source, config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in read_tensors(source).items():
        module = name.removesuffix(".weight")
        weight = tensor.read().float()
        if (n_heads := heads.get(module.rpartition(".")[2])) is not None:
            weight = _paired(weight, n_heads)
        _add(writer, f"{_name(module)}.weight", weight.numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(module: str) -> str:
    if module in OUTSIDE:
        return OUTSIDE[module]
    _, _, index, last = module.split(".", 3)
    return f"blk.{index}.{NAMES[last]}"


def _paired(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a head as llama.cpp rotates them: the halves take turns."""
    split = weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, name: str, weight: "np.ndarray[Any, Any]", kind: str) -> None:
    of_kind = gguf.GGMLQuantizationType[kind]
    if weight.ndim == 1 or kind == "F32":
        writer.add_tensor(name, weight.astype(np.float32))
        return
    writer.add_tensor(name, gguf.quants.quantize(weight, of_kind), raw_dtype=of_kind)


def _add_tokens(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    from transformers import AutoTokenizer

    by_number = {n: text for text, n in AutoTokenizer.from_pretrained(source).get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_number.get(n, f"[PAD{n}]") for n in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
