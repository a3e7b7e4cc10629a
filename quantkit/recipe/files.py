"""Recipe files as plain data, and the additions after a plus sign."""

from pathlib import Path
from typing import Any

from quantkit import resources
from quantkit.errors import RecipeError, UnknownName
from quantkit.specs import read_yaml

KV_CACHES: dict[str, dict[str, Any]] = {"kv-fp8": {}, "kv-fp8-head": {"strategy": "attn_head"}}
HEAD = "head-int8"
ADDITIONS = {
    "kv-fp8": "keeps the KV cache in FP8, with scales from calibration",
    "kv-fp8-head": "keeps the KV cache in FP8 with a scale per head (vLLM with FlashAttention)",
    HEAD: "also rounds lm_head to 8-bit integers",
}
"""What can be appended to a recipe's name after a plus."""


def require_addition(name: str) -> None:
    """Refuse an unknown addition."""
    if name not in ADDITIONS:
        raise UnknownName("addition to a recipe", name, ADDITIONS)


def split_addition(name: str) -> tuple[str, str | None]:
    """A recipe's name or path, and the addition after its last plus; a path may contain one too."""
    base, plus, addition = name.rpartition("+")
    if not plus or "/" in addition or addition.endswith((".yaml", ".yml")):
        return name, None
    return base, addition


def content(path: Path) -> dict[str, Any]:
    """The contents of a file, as plain data."""
    data = read_yaml(path, RecipeError, is_ours=path.parent == resources.folder("recipes"))
    if not isinstance(data, dict):
        raise RecipeError(f"{path} is not a recipe: it must be a list of `key: value` lines")
    return data
