"""Shapes for a bare size such as 70B, taken from published models.

Between two published sizes the nearest one is used with its number of layers scaled. The answer
states the assumption: memory is right to a few percent, the KV cache only as far as the model in
question is built alike.
"""

import math
import re
from typing import Any

from quantkit.advise.families import completed, shapes

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mbt])", re.IGNORECASE)
SCALE = {"m": 1e6, "b": 1e9, "t": 1e12}
KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
# From the config.json of each on the hub.
PUBLISHED = {
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 49152),
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936),
    "Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128256),
    "Mistral-7B-v0.3": (4096, 14336, 32, 32, 8, 32768),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064),
    "Mistral-Small-24B": (5120, 32768, 40, 32, 8, 131072),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064),
    "Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128256),
    "Llama-3.1-405B": (16384, 53248, 126, 128, 8, 128256),
}
MIXTURE_KEYS = (
    "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "head_dim", "num_experts", "num_experts_per_tok",
)  # fmt: skip
# From the config.json of each on the hub.
MIXTURES = {
    "Mixtral-8x7B": (4096, 14336, 32, 32, 8, 32000, 128, 8, 2),
    "Mixtral-8x22B": (6144, 16384, 56, 48, 8, 32768, 128, 8, 2),
    "Qwen3-30B-A3B": (2048, 768, 48, 32, 4, 151936, 128, 128, 8),
    "Qwen3-235B-A22B": (4096, 1536, 94, 64, 4, 151936, 128, 128, 8),
    "gpt-oss-20b": (2880, 2880, 24, 64, 8, 201088, 64, 32, 4),
    "gpt-oss-120b": (2880, 2880, 36, 64, 8, 201088, 64, 128, 4),
}
TIED = ("SmolLM2-135M", "Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen2.5-1.5B", "Llama-3.2-3B")
HEADS = {"Mistral-Small-24B": 128}
"""Head dimensions that are not the hidden size over the heads."""

PUBLISHERS = {
    "SmolLM2": "HuggingFaceTB", "Qwen2.5": "Qwen", "Llama": "meta-llama", "Mistral": "mistralai",
}  # fmt: skip
"""Publisher on the hub, by the start of the model's name."""
HUB_NAMES = {"Mistral-Small-24B": "Mistral-Small-24B-Base-2501"}
"""Longer names on the hub."""


def hub_id(name: str, config: dict[str, Any]) -> str:
    """A published model's hub id; empty if the config is not its own."""
    if config["num_hidden_layers"] != PUBLISHED[name][KEYS.index("num_hidden_layers")]:
        return ""
    who = next(who for begin, who in PUBLISHERS.items() if name.startswith(begin))
    return f"{who}/{HUB_NAMES.get(name, name)}"


def parse(text: str) -> int | None:
    """Weights in `70B`, `7 b` or `7000M`; None if it is not a size."""
    match = SIZE.fullmatch(text.strip())
    number = round(float(match[1]) * SCALE[match[2].lower()]) if match else 0
    return number if 10**6 <= number <= 10**14 else None


def moe_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """A published MoE model by its name, or by the sizes in it: `8x7B`, `30B-A3B`."""
    asked = text.strip().lower()
    for name, numbers in MIXTURES.items():
        sizes = name.lower().partition("-")[2]
        if asked == name.lower() or (asked == sizes and sizes[0].isdigit()):
            own = name.startswith("gpt-oss")
            return name, completed(
                {
                    "architectures": ["GptOssForCausalLM" if own else "Qwen3MoeForCausalLM"],
                    "model_type": "gpt_oss" if own else "qwen3_moe",
                    "dtype": "bfloat16",
                    "max_position_embeddings": 131072,
                    "tie_word_embeddings": False,
                    "decoder_sparse_step": 1,
                    "intermediate_size": numbers[1],
                    **dict(zip(MIXTURE_KEYS, numbers, strict=True)),
                }
            )
    return None


def config_of(n_weights: int) -> tuple[str, dict[str, Any]]:
    """The published model used, and its config with layers adjusted."""
    if name := next((known for known in PUBLISHED if _nominal(known) == n_weights), None):
        return name, _config(name)  # "1B" is the publisher's name, whatever the count
    name = min(PUBLISHED, key=lambda known: abs(math.log(_count(_config(known)) / n_weights)))
    config = _config(name)
    layers = config["num_hidden_layers"]
    fixed = _count(config | {"num_hidden_layers": 1})
    a_layer = (_count(config) - fixed) // (layers - 1)
    scaled = 1 + max(0, round((n_weights - fixed) / a_layer))
    # "8B" means the published model, not one with a layer less.
    near = abs(_count(config) / n_weights - 1) < 0.07
    return name, config | {"num_hidden_layers": layers if near else scaled}


def _nominal(name: str) -> int | None:
    """The size in a model's name."""
    return next(filter(None, map(parse, name.split("-"))), None)


def _config(name: str) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": name in TIED,
        **dict(zip(KEYS, PUBLISHED[name], strict=True)),
    }
    return completed(config | ({"head_dim": HEADS[name]} if name in HEADS else {}))


def _count(config: dict[str, Any]) -> int:
    """Weights of a model whose layers are all alike."""

    def total(n_layers: int) -> int:
        found = shapes(config | {"num_hidden_layers": n_layers}, "").values()
        return sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in found)

    first = total(1)
    return first + (config["num_hidden_layers"] - 1) * (total(2) - first)
