"""Which layers of a mixed checkpoint have which format, in a few rows."""

import re

from quantkit import numbers
from quantkit.export.manifest import Manifest
from quantkit.recipe import GGUFRecipe, Recipe
from quantkit.recipe.patterns import ranges, split

BLOCK = re.compile(r"^(?:.*?\.)?(\d+)\.(.+)$")


def rows(manifest: Manifest) -> list[list[str]]:
    """Layers, blocks and format; empty if all have one format."""
    recipe = manifest.recipe
    found: dict[tuple[str, str], list[int]] = {}
    if isinstance(recipe, GGUFRecipe):
        for pattern, kind in recipe.tensors.items():
            _add_pattern(found, pattern, kind)
    elif recipe.groups or recipe.unquantised:
        for module in manifest.layers:
            match = BLOCK.match(module)
            kind = re.sub(r"\.\d+(?=\.)", "", match[2]) if match else module
            key = kind, label(recipe.part(module))
            found.setdefault(key, []).extend([int(match[1])] if match else [])
        for pattern in recipe.unquantised:
            _add_pattern(found, pattern, "16 bits")
    return [[kind, ranges(blocks), format] for (kind, format), blocks in found.items()]


def _add_pattern(found: dict[tuple[str, str], list[int]], pattern: str, format: str) -> None:
    kind, blocks = split(pattern)
    found.setdefault((kind, format), []).extend(blocks)


def label(part: Recipe) -> str:
    """A short label of the numbers, such as `W4A16 g64`."""
    weights, inputs = part.weights, part.input_activations
    static = inputs is not None and inputs.dynamic is False
    return numbers.label(weights, inputs, weights.symmetric, static)
