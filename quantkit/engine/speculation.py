"""How engines are told to guess ahead: vLLM's config, llama.cpp's flags, and kinds of heads."""

from pathlib import Path
from typing import Any, Literal

from quantkit.parsing import parse_json

Kind = Literal["draft_model", "ngram", "eagle", "eagle3"]
NGRAM = (2, 4)
"""The shortest and the longest run of tokens that is looked up."""


def vllm_config(kind: Kind, model: str, n_tokens: int, n_gpus: int = 1) -> dict[str, Any]:
    """vLLM's `--speculative-config`."""
    result: dict[str, Any] = {"method": kind, "num_speculative_tokens": n_tokens}
    if kind == "ngram":
        low, high = NGRAM
        return {**result, "prompt_lookup_min": low, "prompt_lookup_max": high}
    result["model"] = model
    if n_gpus > 1:
        result["draft_tensor_parallel_size"] = n_gpus
    return result


def llama_cpp_flags(kind: Kind, model: str, n_tokens: int) -> list[tuple[str, str]]:
    """Flags of `llama-server`."""
    if kind == "ngram":
        return [("--spec-type", "ngram-simple")]
    # Of heads it knows only one kind.
    name = "draft-simple" if kind == "draft_model" else "draft-eagle3"
    return [
        ("--spec-type", name),
        ("--model-draft", model),
        ("--spec-draft-n-max", str(n_tokens)),
    ]


def head_kind(place: Path) -> Kind:
    """Heads of the third kind say so in their class, as vLLM knows it, or in their name."""
    try:
        config = parse_json((place / "config.json").read_bytes(), finite=False)
    except (OSError, ValueError):  # a name in the hub, of which nothing is here
        config = {}
    classes = config.get("architectures") if isinstance(config, dict) else None
    words = f"{classes} {place.resolve().name}".lower()
    return "eagle3" if "eagle3" in words or "eagle-3" in words else "eagle"
