"""Speculative decoding settings for vLLM (config) and llama.cpp (flags), and kinds of drafts.

DIR            a small model of the same family ngram          what followed the same tokens before
suffix         the same with a tree over earlier answers too (vLLM with arctic-inference) mtp
the model's own multi-token prediction layers eagle:DIR      a head trained for this model, EAGLE-1
or EAGLE-3 according to its config eagle3:DIR     an EAGLE-3 head medusa:DIR     several heads that
propose at once
"""

from pathlib import Path
from typing import Any, Literal

from quantkit.errors import EngineError
from quantkit.parsing import parse_json

Kind = Literal["draft_model", "ngram", "suffix", "mtp", "eagle", "eagle3", "medusa"]
WITHOUT_MODEL: tuple[Kind, ...] = ("ngram", "suffix", "mtp")
"""Kinds that need nothing but the model."""
HEADS: tuple[Kind, ...] = ("eagle", "eagle3", "medusa")
"""Kinds whose folder holds a head, not a model; written as a prefix with a colon."""
SAMPLED: tuple[Kind, ...] = ("draft_model", "mtp", "eagle", "eagle3")
"""Kinds for which vLLM can sample drafts from their distribution (`draft_sample_method`)."""
SAMPLINGS = ("greedy", "probabilistic")
NGRAM = (2, 4)
"""Shortest and longest run of tokens that is looked up."""


def vllm_config(
    kind: Kind, model: str, n_tokens: int, n_gpus: int = 1, sampling: str | None = None
) -> dict[str, Any]:
    """vLLM's `--speculative-config`."""
    result: dict[str, Any] = {"method": kind, "num_speculative_tokens": n_tokens}
    if kind == "ngram":
        low, high = NGRAM
        return {**result, "prompt_lookup_min": low, "prompt_lookup_max": high}
    if kind not in WITHOUT_MODEL:
        result["model"] = model
        if n_gpus > 1:
            result["draft_tensor_parallel_size"] = n_gpus
    if sampling is not None and kind in SAMPLED:
        result["draft_sample_method"] = sampling
    return result


def llama_cpp_flags(
    kind: Kind, model: str, n_tokens: int, sampling: str | None = None
) -> list[tuple[str, str]]:
    """Flags of `llama-server`."""
    names = {
        "ngram": "ngram-simple",
        "draft_model": "draft-simple",
        "eagle": "draft-eagle3",  # the only kind of head it supports
        "eagle3": "draft-eagle3",
        "mtp": "draft-mtp",
    }
    if kind not in names:
        raise EngineError(f"llama.cpp does not draft with {kind}; it takes {', '.join(names)}")
    found = [("--spec-type", names[kind])]
    if kind == "ngram":
        return found
    if kind != "mtp":
        found.append(("--model-draft", model))
    found.append(("--spec-draft-n-max", str(n_tokens)))
    return [*found, ("--spec-draft-sampling", sampling)] if sampling else found


def head_kind(place: Path) -> Kind:
    """EAGLE-3 heads are recognised by their class, as in vLLM, or by their name."""
    try:
        config = parse_json((place / "config.json").read_bytes(), finite=False)
    except (OSError, ValueError):  # a hub id, with no files here
        config = {}
    classes = config.get("architectures") if isinstance(config, dict) else None
    words = f"{classes} {place.resolve().name}".lower()
    return "eagle3" if "eagle3" in words or "eagle-3" in words else "eagle"


def parse(text: str) -> tuple[Kind, str]:
    """Kind and place of a draft in the notation above; anything else is a model."""
    if text in WITHOUT_MODEL:
        return text, ""
    before, colon, place = text.partition(":")
    if colon and before == "eagle":
        return head_kind(Path(place)), place
    if colon and before in HEADS:
        return before, place
    return "draft_model", text
