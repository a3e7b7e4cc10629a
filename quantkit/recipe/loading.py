"""Recipes by name or from the user's own file, and additions after a plus sign."""

from pathlib import Path

from quantkit import resources
from quantkit.errors import RecipeError
from quantkit.recipe.checkpoint import Recipe
from quantkit.recipe.files import ADDITIONS as ADDITIONS
from quantkit.recipe.files import content, require_addition
from quantkit.recipe.files import split_addition as split_addition
from quantkit.recipe.gguf import CONVERTED, GGUFRecipe

AnyRecipe = Recipe | GGUFRecipe


def load(name: str) -> AnyRecipe:
    """A recipe of either kind by name, or from the user's own file."""
    base, addition = split_addition(name)
    if addition is None:
        return read(resources.find("recipes", name))
    require_addition(addition)
    recipe = load(base)
    if isinstance(recipe, GGUFRecipe):
        raise RecipeError(f"{addition} cannot be combined with {recipe.name}, a file for llama.cpp")
    return recipe.plus(addition)


def read(path: Path) -> AnyRecipe:
    """A recipe of either kind from a file."""
    data = content(path)
    if str(data.get("gguf")).upper() == CONVERTED:
        raise RecipeError(
            f"{path}: {CONVERTED} files for llama.cpp are made from a checkpoint: quantise with "
            "nvfp4-a16, then call quantkit convert DIR --to gguf"
        )
    kind: type[AnyRecipe] = GGUFRecipe if "gguf" in data else Recipe
    return kind.validated({"name": path.stem, **data}, path)
