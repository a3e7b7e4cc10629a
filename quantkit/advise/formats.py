"""The formats to choose from: recipes, and what decides where they run and how well they do."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from quantkit import resources
from quantkit.hardware import support
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe, load, split_addition

UNQUANTISED = "unquantised"
"""Name of the model without a recipe."""
UNQUANTISED_GGUF = "gguf-bf16"
"""Name of the recipe that leaves every number unchanged."""
# One of each kind: others of the same kind take as much memory and time. For 4 bits, the one
# that lost least in our own reports.
FLOATS = ("fp8-dynamic", "fp8-block", "mxfp8", "nvfp4", "mxfp4")
SERVED = (*FLOATS, "int8-w8a8", "gptq-w8a16", "awq-gptq-w4a16")
MOE_RECIPES = (*FLOATS, "gptq-w8a16", "gptq-w4a16")
"""Recipes that the native engine supports for MoE models."""
FILES = (
    UNQUANTISED_GGUF, "gguf-q8_0", "gguf-q6_k", "gguf-q5_k_m", "gguf-q4_k_m", "gguf-iq4_xs",
    "gguf-q3_k_m", "gguf-q2_k",
)  # fmt: skip


MXFP4_FILE = "gguf-mxfp4_moe"
"""Only for models whose experts were published in MXFP4, which it keeps: for others there is no
figure of what rounding to it costs.
"""
NUMBER = re.compile(r"\d+")
"""In the name of a GGUF type: the bits of its weights."""


@dataclass(frozen=True)
class Format:
    """A recipe, or none, with the engine that serves its output."""

    name: str
    recipe: AnyRecipe | None
    key: str
    """One of `support.FORMATS`."""
    engine: str
    """One of `support.ENGINES`."""
    has_fp8_cache: bool = False

    @property
    def base(self) -> str:
        """Its name without the cache suffix."""
        return self.name.removesuffix("+kv-fp8")

    @property
    def is_whole(self) -> bool:
        """Whether every number of the model is unchanged."""
        return self.name in (UNQUANTISED, UNQUANTISED_GGUF)

    @property
    def least_bits(self) -> int:
        """Bits of the smallest weight."""
        if isinstance(self.recipe, Recipe):
            return min(part.weights.num_bits for part in self.recipe.parts)
        if self.recipe is None:
            return 16
        kinds = (self.recipe.gguf, *self.recipe.tensors.values())
        return min(int(found[0]) for kind in kinds if (found := NUMBER.search(kind)))

    @property
    def kv_bits(self) -> int:
        return 8 if self.has_fp8_cache else 16

    @property
    def quality_class(self) -> str:
        """The class of formats that published quality figures distinguish."""
        return self.name if isinstance(self.recipe, GGUFRecipe) else self.key

    @property
    def is_blocks(self) -> bool:
        """A GGUF file of less than 16 bits."""
        return isinstance(self.recipe, GGUFRecipe) and self.recipe.gguf not in (
            "BF16", "F16", "F32",
        )  # fmt: skip

    @property
    def has_own_arithmetic(self) -> bool:
        """Whether it is computed in fewer bits; others compute in 16."""
        return self.key in RATES


RATES = {
    "int8-w8a8": "int8_tops",
    "fp8-w8a8": "fp8_tflops",
    "fp8-block": "fp8_tflops",
    "mxfp8": "fp8_tflops",
    "w4afp8": "fp8_tflops",
    "nvfp4": "fp4_tflops",
    "nvfp4-fp8": "fp4_tflops",
    "mxfp4": "fp4_tflops",
}
"""The rate of a GPU at which a format computes where it is native; all others compute in 16 bits
(mxfp4-a16 also counts so on Blackwell, where vLLM rounds its activations unasked).
"""


def of(recipe: AnyRecipe | None) -> Format:
    """The format that a recipe produces."""
    key = support.format_of(recipe)
    if recipe is None:
        return Format(UNQUANTISED, None, key, "vllm")
    if isinstance(recipe, GGUFRecipe):
        return Format(recipe.name, recipe, key, "llama.cpp")
    return Format(recipe.name, recipe, key, "vllm", recipe.kv_cache is not None)


def considered(scored: Iterable[str] = (), is_moe: bool = False) -> tuple[Format, ...]:
    """All formats that a recommendation chooses from, each also with an FP8 cache.

    Includes recipes that ship with quantkit and were `scored` in a report of the model.
    """
    usual = _usual(is_moe)
    names, shipped = {one.name for one in usual}, resources.names("recipes")
    more = [name for name in scored if name not in names and split_addition(name)[0] in shipped]
    return (*usual, *(of(load(name)) for name in more))


@cache
def _usual(is_moe: bool) -> tuple[Format, ...]:
    bases = MOE_RECIPES if is_moe else SERVED
    plain = [Recipe.load(base) for base in bases]
    found: list[AnyRecipe] = [r for recipe in plain for r in (recipe, recipe.plus("kv-fp8"))]
    found += map(load, FILES)
    return (of(None), *map(of, found))
