"""Memory of other tools' GGUF files, from their headers.

A header has every tensor's type and size and the numbers that determine the cache, so a plan for
the file is as exact as for one that quantkit made.
"""

from typing import Any

from quantkit.advise import weights
from quantkit.advise.shape import ModelShape, Tensor
from quantkit.gguf.reader import GGUF
from quantkit.recipe import GGUFRecipe, load

CONFIG = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Config keys, and llama.cpp's names for them after the architecture's."""
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads")
RECURRENT = ("ssm.state_size", "wkv.head_size")
"""Keys of architectures with another kind of cache."""


def described(file: GGUF) -> tuple[ModelShape, GGUFRecipe] | None:
    """The shape and a recipe that stands for the file's types; None where its cache is not known.

    Windows of single layers are not in every header, so a cache may be overestimated.
    """
    architecture = file.metadata.get("general.architecture")
    found: dict[str, Any] = {}
    for key, theirs in CONFIG.items():
        value = file.metadata.get(f"{architecture}.{theirs}")
        if isinstance(value, list):
            value = max((v for v in value if isinstance(v, int)), default=None)
        if isinstance(value, int) and value > 0:
            found[key] = value
    if any(key not in found for key in NEEDED):
        return None
    if any(f"{architecture}.{key}" in file.metadata for key in RECURRENT):
        return None
    table = file.tensors.get("token_embd.weight")
    if table is None:
        return None
    config = {
        "model_type": str(architecture),
        "vocab_size": table.shape[0],
        "max_position_embeddings": 2048,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **found,
        "sliding_window": None,
    }
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    tensors = tuple(Tensor(entry.name, "BF16", entry.shape) for entry in file.tensors.values())
    shape = ModelShape(file.path.stem, config, tensors)
    recipe = load("gguf-q8_0")  # any recipe: sizes are the file's own
    assert isinstance(recipe, GGUFRecipe)
    weights.remember(shape, recipe, {name: e.n_bytes for name, e in file.tensors.items()})
    return shape, recipe
