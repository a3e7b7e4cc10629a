"""A recipe: what to do to weights and activations, in the terms of compressed-tensors.

The calibration set is chosen per run, not by the recipe. Unknown keys are refused, and all problems
of a file are listed at once.
"""

from quantkit.recipe.checkpoint import Recipe
from quantkit.recipe.gguf import GGUF_TYPES, GGUFRecipe
from quantkit.recipe.loading import ADDITIONS, AnyRecipe, load, read, split_addition
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme

__all__ = [
    "ADDITIONS",
    "GGUF_TYPES",
    "ActivationScheme",
    "AnyRecipe",
    "GGUFRecipe",
    "KVCacheScheme",
    "Recipe",
    "WeightScheme",
    "load",
    "read",
    "split_addition",
]
