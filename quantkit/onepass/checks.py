"""Checks what a run is asked to do, before torch is needed for anything."""

from collections.abc import Sequence
from pathlib import Path

from quantkit import resources
from quantkit.errors import DataError, RecipeError, UsageError
from quantkit.model.source import ModelSource
from quantkit.onepass.mark import refuse_others
from quantkit.recipe import AnyRecipe, GGUFRecipe
from quantkit.registry import NATIVE, check_engine
from quantkit.storage import require_space, require_writable


def check(
    recipes: Sequence[AnyRecipe],
    out: Path,
    calibrated: bool,
    imatrix: Path | None = None,
    engine: str = NATIVE,
    force: bool = False,
) -> None:
    """Check names, folders and combinations; whether a model fits is checked later."""
    check_engine(engine)
    refuse_twice(recipes)
    require_writable(out)
    refuse_others([out / recipe.name for recipe in recipes], force)
    check_learning(recipes, calibrated, imatrix, engine)


def check_learning(
    recipes: Sequence[AnyRecipe], calibrated: bool, imatrix: Path | None, engine: str
) -> None:
    """Check that recipes get the data they need, and that nothing is given that none uses."""
    files = [recipe for recipe in recipes if isinstance(recipe, GGUFRecipe)]
    learning = [recipe for recipe in recipes if recipe.needs_calibration]
    if learning and not calibrated:
        # own-traffic is a template: it needs a file of one's own.
        shipped = [name for name in resources.names("calibration") if name != "own-traffic"]
        raise DataError(
            f"recipe {learning[0].name} needs calibration data: give --calibration, a set's name "
            f"({', '.join(shipped)}) or a file of text or chats"
        )
    if imatrix is not None and not files:
        raise RecipeError("--imatrix is for GGUF recipes, and none was given")
    if imatrix is not None and not imatrix.is_file():
        what = "not a file" if imatrix.exists() else "No such file or directory"
        raise DataError(f"cannot read {imatrix}: {what}")
    if engine != NATIVE and files:
        raise RecipeError(f"engine {engine} makes no GGUF files; use --engine native")


def refuse_twice(recipes: Sequence[AnyRecipe]) -> None:
    """Refuse two recipes with one name: they would share a folder."""
    names = [recipe.name for recipe in recipes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"recipe {min(twice)} is given twice; give it once")


def require_least_space(source: ModelSource, recipes: Sequence[AnyRecipe], out: Path) -> None:
    """Refuse if not even the smallest size fits on disk; exact sizes need the model's structure."""
    elements = sum(tensor.n_elements for tensor in source.tensors.values())
    bits = sum(_fewest_bits(recipe) for recipe in recipes)
    require_space(out, elements * bits // 8, "more than ")


def _fewest_bits(recipe: AnyRecipe) -> int:
    if isinstance(recipe, GGUFRecipe):
        return 1
    return min([recipe.weights.num_bits, *(group.weights.num_bits for group in recipe.groups)])
