"""Bytes of a checkpoint to be, from a model's shape and a recipe: those that `quantize` writes.

The plans are the same that a run makes; here they are made from a shape, without torch.
"""

import re
from functools import lru_cache

from quantkit.advise.shape import ModelShape
from quantkit.model.architecture import EXPERT
from quantkit.model.headers import TensorSpec
from quantkit.plan import checkpoint as planning
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe

NUMBER = re.compile(r"\.(\d+)\.")


def weight_bytes(shape: ModelShape, recipe: AnyRecipe, has_importance: bool = False) -> int:
    """Bytes of all tensors that the recipe makes of the model, as its manifest will say.

    `has_importance`: a GGUF file is made with calibration, which changes the types of a few
    tensors in Q4_0, Q5_0 and IQ4 files.
    """
    if isinstance(recipe, Recipe):
        return sum(n * spec.size_bytes for spec, n in counted(shape, recipe))
    return sum(gguf_tensors(shape, recipe, has_importance).values())


def counted(shape: ModelShape, recipe: Recipe | None) -> list[tuple[TensorSpec, int]]:
    """Every tensor of the checkpoint, or of the model as it is, and how many it stands for."""
    thin, n_experts = thinned(shape, recipe)
    specs = thin.stored if recipe is None else plan(shape, recipe).specs
    if n_experts == 1:
        return [(spec, 1) for spec in specs]
    return [(spec, n_experts if EXPERT.search(spec.name) else 1) for spec in specs]


def thinned(shape: ModelShape, recipe: Recipe | None) -> tuple[ModelShape, int]:
    """`ModelShape.thin`, unless a recipe tells experts apart."""
    named = [] if recipe is None else [*recipe.targets, *recipe.ignore]
    return (shape, 1) if any("experts" in name for name in named) else shape.thin


@lru_cache(1 << 16)
def at_block(name: str) -> tuple[str, int | None, str]:
    """A name before the number of its block, the number, and what is behind; without one, all of
    it comes first. Formats of a model have most names in common."""
    found = NUMBER.search(name)
    if found is None:
        return name, None, ""
    return name[: found.start()], int(found[1]), name[found.end() :]


def digest(shape: ModelShape, recipe: AnyRecipe | None) -> str:
    """What a recipe is remembered by: its digest, which takes longer than it should."""
    if recipe is None:
        return ""
    place, made = ("digest", id(recipe)), shape.made
    if place not in made:
        made[place] = recipe, recipe.digest  # with the recipe, so that its id stays its own
    found: str = made[place][1]
    return found


def plan(shape: ModelShape, recipe: Recipe) -> planning.Plan:
    """The plan of the checkpoint, made once, and of a mixture for one expert of each layer."""
    key = digest(shape, recipe)
    if key not in shape.made:
        thin, _ = thinned(shape, recipe)
        if recipe.kv_cache is None:
            made = planning.make(thin.architecture, thin.stored, recipe)
        else:
            plain = plan(shape, without_cache(shape, recipe))
            made = planning.with_cache(plain, recipe, thin.architecture, thin.stored)
        shape.made[key] = made
    found: planning.Plan = shape.made[key]
    return found


def without_cache(shape: ModelShape, recipe: Recipe) -> Recipe:
    """The recipe without its FP8 cache; the same one each time."""
    key = "plain", digest(shape, recipe)
    if key not in shape.made:
        shape.made[key] = recipe.model_copy(update={"kv_cache": None})
    found: Recipe = shape.made[key]
    return found


def remember(shape: ModelShape, recipe: GGUFRecipe, sizes: dict[str, int]) -> None:
    """Sizes of a file that exists, in place of those that the recipe would give."""
    for has_importance in (False, True):
        shape.made[digest(shape, recipe), has_importance] = sizes


def gguf_tensors(
    shape: ModelShape, recipe: GGUFRecipe, has_importance: bool = False
) -> dict[str, int]:
    """Bytes of every tensor of the file, by its name there."""
    from quantkit.gguf import mixture
    from quantkit.gguf.tensors import size_bytes

    key = digest(shape, recipe), has_importance
    if key in shape.made:
        return dict(shape.made[key])
    tensors, metadata = shape.gguf
    choices = mixture.choose(
        recipe.gguf,
        [(tensor.name, tensor.shape) for tensor in tensors],
        metadata,
        has_importance,
        recipe.tensors,
    )
    shape.made[key] = {t.name: size_bytes(t.shape, choices[t.name].kind) for t in tensors}
    return dict(shape.made[key])
