"""Small models on disk: random Llamas with the demo's tokenizer, and the demo cut short."""

import shutil
from pathlib import Path
from typing import Any

from quantkit import resources

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
READABLE = {"vocab_size": 4096, "max_position_embeddings": 256}
"""Sizes of a model that knows all of the tokenizer's tokens, and so can read texts."""


def save_llama(
    folder: Path, max_shard_size: str = "1GB", dtype: str = "bfloat16", **config: Any
) -> Path:
    """Write one, the same for the same arguments; sizes go by their config names."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(**SIZES | config, dtype=dtype, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(described).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return with_tokenizer(folder)


def cut_demo(folder: Path, n_blocks: int = 2) -> Path:
    """The demo model less its last blocks: those that stay see and give what they do in it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    gone = tuple(f"model.layers.{index}." for index in range(n_blocks, 6))
    shutil.copytree(resources.DEMO_MODEL, folder, ignore=lambda *_: ["model.safetensors"])
    with safe_open(resources.DEMO_MODEL / "model.safetensors", "pt") as stored:
        kept = {n: stored.get_tensor(n) for n in stored.keys() if not n.startswith(gone)}  # noqa: SIM118
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text()
    assert config.count('"num_hidden_layers": 6') == 1
    changed = config.replace('"num_hidden_layers": 6', f'"num_hidden_layers": {n_blocks}')
    (folder / "config.json").write_text(changed)
    return folder


def with_tokenizer(folder: Path) -> Path:
    """Put the demo model's tokenizer into a folder."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(resources.DEMO_MODEL / name, folder / name)
    return folder
