"""Bytes of a planned checkpoint, from a model's shape and a recipe: those that `quantize` writes.

The plans are the same that a run makes; here they are made from a shape, without torch.
"""

import re
from collections.abc import Mapping
from itertools import chain

from quantkit.advise.shape import ModelShape, Sample
from quantkit.model.headers import TensorSpec
from quantkit.plan import checkpoint as planning
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe

DIGIT = re.compile(r"\d|\\[dw]")


def weight_bytes(shape: ModelShape, recipe: AnyRecipe, has_importance: bool = False) -> int:
    """Bytes of all tensors that the recipe writes for the model, as its manifest will state.

    `has_importance`: a GGUF file is made with calibration, which changes the types of a few tensors
    in Q4_0, Q5_0 and IQ4 files.
    """
    if isinstance(recipe, Recipe):
        return sum(n * spec.size_bytes for spec, n in counted(shape, recipe))
    return sum(gguf_tensors(shape, recipe, has_importance).values())


def counted(shape: ModelShape, recipe: Recipe | None) -> list[tuple[TensorSpec, int]]:
    """Every tensor of the checkpoint, or of the unquantised model, and how many it stands for."""
    sample = sample_of(shape, recipe)
    specs = sample.shape.stored if recipe is None else plan(shape, recipe).specs
    return [(spec, sample.count(spec.name)) for spec in specs]


def sample_of(shape: ModelShape, recipe: Recipe | None) -> Sample:
    """`ModelShape.sample`, as far as a recipe does not distinguish experts or blocks."""
    if recipe is None:
        return shape.sample
    named = [*recipe.targets, *recipe.ignore, *recipe.unquantised, *chain(*recipe.group_targets)]
    if any("experts" in name for name in named):
        return Sample(shape)
    if any(DIGIT.search(name) for name in named):
        return Sample(*shape.thin)
    return shape.sample


def digest(shape: ModelShape, recipe: AnyRecipe | None) -> str:
    """Cache key of a recipe: its digest, which is slow to compute."""
    if recipe is None:
        return ""
    place, made = ("digest", id(recipe)), shape.cache
    if place not in made:
        made[place] = recipe, recipe.digest  # keeps the recipe alive, so that its id is not reused
    found: str = made[place][1]
    return found


def plan(shape: ModelShape, recipe: Recipe) -> planning.Plan:
    """The checkpoint's plan, computed once, with one of all experts and blocks that are alike."""
    key = digest(shape, recipe)
    if key not in shape.cache:
        thin = sample_of(shape, recipe).shape
        if recipe.kv_cache is None:
            made = planning.make(thin.architecture, thin.stored, recipe)
        else:
            plain = plan(shape, without_cache(shape, recipe))
            made = planning.with_cache(plain, recipe, thin.architecture, thin.stored)
        shape.cache[key] = made
    found: planning.Plan = shape.cache[key]
    return found


def without_cache(shape: ModelShape, recipe: Recipe) -> Recipe:
    """The recipe without its FP8 cache; the same object each time."""
    key = "plain", digest(shape, recipe)
    if key not in shape.cache:
        shape.cache[key] = recipe.model_copy(update={"kv_cache": None})
    found: Recipe = shape.cache[key]
    return found


def remember(shape: ModelShape, recipe: GGUFRecipe, sizes: dict[str, int]) -> None:
    """Store the sizes of an existing file, in place of those that the recipe would give."""
    for has_importance in (False, True):
        shape.cache[digest(shape, recipe), has_importance] = sizes


def gguf_tensors(
    shape: ModelShape, recipe: GGUFRecipe, has_importance: bool = False
) -> Mapping[str, int]:
    """Bytes of every tensor of the file, by its name there."""
    from quantkit.gguf import mixture
    from quantkit.gguf.tensors import size_bytes

    key = digest(shape, recipe), has_importance
    if key not in shape.cache:
        tensors, metadata = shape.gguf
        choices = mixture.choose(recipe.gguf, tensors, metadata, has_importance, recipe.tensors)
        shape.cache[key] = {name: size_bytes(size, choices[name].kind) for name, size in tensors}
    found: Mapping[str, int] = shape.cache[key]
    return found
