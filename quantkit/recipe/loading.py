"""Recipes by name or from the user's own file, and what a plus behind either adds."""

from pathlib import Path
from typing import Any

from quantkit import resources
from quantkit.errors import RecipeError, UnknownName
from quantkit.recipe.checkpoint import Recipe
from quantkit.recipe.gguf import GGUFRecipe
from quantkit.specs import read_yaml

ADDITIONS = {"kv-fp8": "keeps keys and values of attention in FP8, with scales from calibration"}
"""What can stand behind a recipe's name, after a plus."""

AnyRecipe = Recipe | GGUFRecipe


def load(name: str) -> AnyRecipe:
    """A recipe of either kind by name, or from the user's own file."""
    base, addition = split_addition(name)
    if addition is None:
        return read(resources.find("recipes", name))
    if addition not in ADDITIONS:
        raise UnknownName("addition to a recipe", addition, ADDITIONS)
    recipe = load(base)
    if isinstance(recipe, GGUFRecipe):
        raise RecipeError(f"{addition} does not go with {recipe.name}: llama.cpp has no such cache")
    return recipe.with_kv_cache(addition)


def read(path: Path) -> AnyRecipe:
    """A recipe of either kind from a file."""
    data = _content(path)
    kind: type[AnyRecipe] = GGUFRecipe if "gguf" in data else Recipe
    return kind.validated({"name": path.stem, **data}, path)


def split_addition(name: str) -> tuple[str, str | None]:
    """A recipe's name or path, and what stands behind its last plus; a path may hold one too."""
    base, plus, addition = name.rpartition("+")
    if not plus or "/" in addition or addition.endswith((".yaml", ".yml")):
        return name, None
    return base, addition


def _content(path: Path) -> dict[str, Any]:
    data = read_yaml(path, RecipeError)
    if not isinstance(data, dict):
        raise RecipeError(f"{path} is no recipe: it must be a list of `key: value` lines")
    return data
