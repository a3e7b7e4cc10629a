"""A recipe for vLLM: a checkpoint in the terms of compressed-tensors."""

import re
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from quantkit import methods, numbers, resources
from quantkit.errors import RecipeError, UnknownName
from quantkit.formats import COMPRESSED_TENSORS, FORMATS, find
from quantkit.numbers import channel_scales
from quantkit.recipe import files, patterns
from quantkit.recipe.named import Named
from quantkit.schemes import ActivationScheme, KVCacheScheme, Strict, WeightScheme
from quantkit.specs import suggestion

TUNING = {"tune": 64}
"""The options that `--tune` sets."""
AUTO_GROUP_SIZES = (128, 64, 32)
HEAD = "lm_head"
HEAD_GROUP = {
    "targets": [rf"re:(.*\.)?{HEAD}$"],
    "method": "rtn",
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
}


class Group(Strict):
    """A different scheme for some layers of a recipe."""

    targets: list[str]
    """Module names, or `re:` and a pattern."""
    weights: WeightScheme
    """The number format of their weights."""
    input_activations: ActivationScheme | None = None
    """The number format of their inputs; none leaves them in 16 bits."""
    method: str | None = None
    """How their weights are quantised; none: by the recipe's method."""


class Recipe(Named):
    """A checkpoint in the terms of compressed-tensors."""

    method: str
    """How weights are quantised; see the table of methods."""
    weights: WeightScheme
    """The number format of weights."""
    input_activations: ActivationScheme | None = None
    """The number format of inputs; none leaves them in 16 bits."""
    kv_cache: KVCacheScheme | None = None
    """The number format of keys and values; none leaves the cache to the serving engine."""
    groups: list[Group] = Field([])
    """Layers with another scheme; if several groups name a layer, the first applies."""
    unquantised: list[str] = Field([])
    """Layers that stay in 16 bits by choice and count in the bits per weight, unlike `ignore`."""
    format: str = COMPRESSED_TENSORS
    """File format: compressed-tensors, gptq, awq or fp8."""
    targets: list[str] = Field(["Linear"])
    """What to quantise: a class name, a module name, or `re:` and a pattern."""
    ignore: list[str] = Field(["lm_head"])
    """What to leave in 16 bits, in the same notation."""
    options: dict[str, Any] = Field({})
    """Settings of the method."""

    # Rules are per field, so that one broken field does not hide another.
    @field_validator("method")
    @classmethod
    def _known(cls, method: str) -> str:
        if method not in methods.METHODS and method not in (known := methods.names()):
            raise ValueError(f"'{method}' is unknown; {suggestion(method, known)}")
        methods.find(method)  # another package's method may be broken
        return method

    @field_validator("weights")
    @classmethod
    def _fits(cls, weights: WeightScheme, info: ValidationInfo) -> WeightScheme:
        method = info.data.get("method")
        if method and (wrong := _wrong_method(method, weights)):
            raise ValueError(wrong)
        return weights

    @field_validator("input_activations")
    @classmethod
    def _alike(
        cls, activations: ActivationScheme | None, info: ValidationInfo
    ) -> ActivationScheme | None:
        weights = info.data.get("weights")
        if weights is not None and (wrong := _wrong_activations(weights, activations)):
            raise ValueError(wrong)
        return activations

    @field_validator("groups")
    @classmethod
    def _work(cls, groups: list[Group], info: ValidationInfo) -> list[Group]:
        for group in groups:
            method = group.method or info.data.get("method")
            wrong = method and _wrong_method(method, group.weights)
            if wrong := wrong or _wrong_activations(group.weights, group.input_activations):
                raise ValueError(wrong)
            if group.weights.group_size == "auto":
                raise ValueError("group_size auto is for the recipe's own weights; name a size")
            if bare := [t for t in group.targets if not t.startswith("re:") and "." not in t]:
                raise ValueError(f"target {bare[0]}: a group names modules, or `re:` and a pattern")
            cls._compiles(group.targets)
        return groups

    @field_validator("format")
    @classmethod
    def _holds(cls, format: str, info: ValidationInfo) -> str:
        if format not in FORMATS:
            raise ValueError(f"'{format}' is unknown; {suggestion(format, FORMATS)}")
        parts = [info.data.get(key) for key in ("weights", "input_activations", "kv_cache")]
        weights, activations, kv_cache = parts
        if info.data.get("groups") and format != COMPRESSED_TENSORS:
            raise ValueError(f"{format} has one kind of numbers; groups need compressed-tensors")
        if weights and (reason := find(format).objection(weights, activations, kv_cache)):
            raise ValueError(reason)
        return format

    @field_validator("targets", "ignore", "unquantised")
    @classmethod
    def _compiles(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a valid pattern: {error}") from error
        return patterns

    @field_validator("options")
    @classmethod
    def _understood(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        method = info.data.get("method")
        if method and (wrong := methods.find(method).wrong_options(method, options)):
            raise ValueError("; ".join(wrong))
        return options

    @classmethod
    def load(cls, name: str) -> "Recipe":
        """A recipe by name, or from the user's own file; `+kv-fp8` and the like extend either."""
        base, addition = files.split_addition(name)
        if addition is not None:
            files.require_addition(addition)
            return cls.load(base).plus(addition)
        path = resources.find("recipes", name)
        data = files.content(path)
        if "gguf" in data:
            raise RecipeError(f"recipe {name} makes a GGUF file, which is not supported here")
        return cls.validated({"name": path.stem, **data}, path)

    def plus(self, addition: str) -> "Recipe":
        """The same with one of `files.ADDITIONS`."""
        name = f"{self.name}+{addition}"
        added: dict[str, Any]
        if addition == files.HEAD:
            if HEAD not in self.ignore:
                raise RecipeError(f"recipe {self.name} rounds {HEAD} already")
            added = {
                "summary": f"{self.name} with {HEAD} in 8-bit integers",
                "ignore": [target for target in self.ignore if target != HEAD],
                "groups": [*self.model_dump()["groups"], HEAD_GROUP],
            }
        else:
            if self.kv_cache is not None:
                raise RecipeError(f"recipe {self.name} already has an FP8 KV cache")
            added = {
                "summary": f"{self.name} with an FP8 KV cache, whose scales come from calibration",
                "kv_cache": files.KV_CACHES[addition],
            }
        return Recipe.validated(self.model_dump() | added | {"name": name}, name)

    def in_format(self, format: str) -> "Recipe":
        """The same scheme in another file format, under a name that says so."""
        if format not in FORMATS:
            raise UnknownName("format", format, FORMATS)
        if format == self.format:
            return self
        parts = self.weights, self.input_activations, self.kv_cache
        if self.groups and format != COMPRESSED_TENSORS:
            raise RecipeError(
                f"recipe {self.name} cannot be written as {format}: it has several kinds of "
                "numbers, which only compressed-tensors holds"
            )
        if reason := find(format).objection(*parts):
            raise RecipeError(f"recipe {self.name} cannot be written as {format}: {reason}")
        name = self.name.removesuffix(f"-{self.format}")
        if format != COMPRESSED_TENSORS:
            name = f"{name}-{format}"
        return Recipe.validated(self.model_dump() | {"name": name, "format": format}, name)

    @property
    def needs_calibration(self) -> bool:
        """Whether the recipe needs calibration data."""
        if self.kv_cache is not None:
            return True
        return any(part.learns for part in self.parts)

    @property
    def learns(self) -> bool:
        """Whether this scheme needs data; for a recipe without groups."""
        return methods.find(self.method).calibrated or self.has_static_inputs

    @property
    def parts(self) -> list["Recipe"]:
        """One recipe per scheme; only this one, where there is a single scheme."""
        if not self.groups:
            return [self]
        return [self._with(None), *(self._with(group) for group in self.groups)]

    @property
    def group_targets(self) -> list[list[str]]:
        """The layers that the parts after the first apply to."""
        return [group.targets for group in self.groups]

    def part(self, module: str) -> "Recipe":
        """The recipe for one layer: this one, or one with a group's scheme."""
        if not self.groups:
            return self
        return self._with(next((g for g in self.groups if _names(g.targets, module)), None))

    def _with(self, group: Group | None) -> "Recipe":
        if group is None:
            return self.model_copy(update={"groups": []})
        update = {
            "groups": [],
            "weights": group.weights,
            "input_activations": group.input_activations,
            "method": group.method or self.method,
        }
        return self.model_copy(update=update)

    @property
    def has_static_inputs(self) -> bool:
        """Whether activations have static scales, which are stored."""
        return self.input_activations is not None and self.input_activations.is_static

    @property
    def smooths(self) -> bool:
        """Whether the recipe scales input channels and folds the inverse elsewhere."""
        return any(methods.find(part.method).smoothing is not None for part in self.parts)

    @property
    def holds_out(self) -> bool:
        """Whether some tokens are held out for validation."""
        return bool(self.options.get("held_out", False))

    @property
    def has_signed_scales(self) -> bool:
        """Whether scales of integers may be negative."""
        return bool(self.options.get("signed", False))

    @property
    def tuning_steps(self) -> int:
        """Steps of the gradient stage after each block; 0: there is none."""
        return int(self.options.get("tune", 0)) if self.propagates else 0

    @property
    def distilling_passes(self) -> int:
        """Final passes over the calibration tokens that tune all scales together; 0: none."""
        return int(self.options.get("distil", 0)) if self.propagates else 0

    @property
    def follows_source(self) -> bool:
        """Whether the source's own states are kept for comparison."""
        return self.tuning_steps > 0 or self.distilling_passes > 0

    def tuned(self, **options: int) -> "Recipe":
        """The same with gradient stages, those of `--tune` unless others are given."""
        if "tune" not in methods.find(self.method).options:
            raise RecipeError(
                f"recipe {self.name} cannot be tuned: method {self.method} has no gradient stage; "
                "GPTQ's recipes have one"
            )
        return self.model_copy(update={"options": {**self.options, **(options or TUNING)}})

    @property
    def propagates(self) -> bool:
        """Whether later blocks see this recipe's own quantised outputs."""
        return bool(self.options.get("propagate", methods.find(self.method).propagates))

    def resolved(self, columns: dict[str, int]) -> tuple["Recipe", str]:
        """This recipe with a concrete group size, and a note on the choice.

        `columns` holds the width of every layer that the recipe targets.
        """
        if self.weights.strategy != "group" or self.weights.type == "float":
            return self, ""
        asked = self.weights.group_size
        sizes = (asked,) if isinstance(asked, int) else AUTO_GROUP_SIZES
        columns = {n: width for n, width in columns.items() if self.part(n).weights == self.weights}
        for size in sizes:
            if all(width % size == 0 for width in columns.values()):
                weights = self.weights.model_copy(update={"group_size": size})
                word = f"group size {size} (auto)" if asked == "auto" else ""
                return self.model_copy(update={"weights": weights}), word
        bad = {name: width for name, width in columns.items() if width % sizes[-1]}
        name, width = next(iter(bad.items()))
        raise RecipeError(
            f"recipe {self.name}: group size {asked} does not divide the width {width} of {name} "
            f"({len(bad)} such layers); put them into `ignore`, or use strategy channel"
        )

    def explain(self) -> str:
        """What the recipe does, in words."""
        inputs = self.input_activations
        activations = f"Activations: {inputs.words()}" if inputs else "Activations stay in 16 bits"
        cache = "in the engine's own type; append +kv-fp8 to the recipe's name for FP8"
        if self.kv_cache is not None:
            cache = self.kv_cache.words()
        form = "" if self.format == COMPRESSED_TENSORS else f" Files in {self.format} form."
        others = f"\n16 bits: {patterns.words(self.unquantised)}." if self.unquantised else ""
        for group in self.groups:
            own = group.input_activations
            both = f"{group.weights.words()}, activations {own.words()}" if own else None
            others += f"\n{both or group.weights.words()}: {patterns.words(group.targets)}."
        data = "needs calibration" if self.needs_calibration else "needs no data"
        left = f", except {', '.join(self.ignore)}" if self.ignore else ""
        return (
            f"Weights: {self.weights.words()}. {activations}.\n"
            f"KV cache: {cache}.{others}\n"
            f"Method: {self.method} ({methods.find(self.method).summary}); {data}. "
            f"Layers: {', '.join(self.targets)}{left}.{form}"
        )

    def _decisive(self, content: dict[str, Any]) -> dict[str, Any]:
        # So that recipes without these keep their old digest.
        usual: dict[str, Any] = {
            "kv_cache": None,
            "groups": [],
            "unquantised": [],
            "format": COMPRESSED_TENSORS,
        }
        return {k: value for k, value in content.items() if k not in usual or value != usual[k]}


def _names(targets: list[str], module: str) -> bool:
    """Whether targets name a module, by compressed-tensors' rules."""
    return any(
        re.match(target.removeprefix("re:"), module)
        if target.startswith("re:")
        else target == module
        for target in targets
    )


def _wrong_method(method: str, weights: WeightScheme) -> str:
    if weights.kind in methods.find(method).types:
        return ""
    if weights.kind == "fp4":
        return f"method {method} rounds to integers; FP4 needs method rtn or gptq"
    return f"method {method} rounds to integers; FP8 needs method rtn"


def _wrong_activations(weights: WeightScheme, activations: ActivationScheme | None) -> str:
    """What vLLM does not support; empty where it does."""
    if activations is None:
        return ""
    if weights.type == "float" and weights.group_size is not None:
        alike = ("num_bits", "type", "strategy", "group_size")
        if any(getattr(weights, key) != getattr(activations, key) for key in alike):
            name = numbers.of(weights).words.partition(" ")[0]
            return f"{name} weights go with {name} activations, or with none"
        return ""
    if channel_scales.apply_to(weights, activations):
        if (weights.num_bits, weights.symmetric, weights.group_size) != (4, True, 128):
            return (
                "FP8 activations need FP8 weights, or symmetric 4-bit integers of "
                "group_size 128 (W4AFP8)"
            )
        return "" if activations.strategy == "token" else "W4AFP8 has one scale per token"
    if (weights.type, weights.num_bits) != (activations.type, 8) or activations.num_bits != 8:
        return "activations need 8-bit weights of the same type"
    if (weights.strategy == "block") != (activations.strategy == "group"):
        return "block weights need group activations, and the other way round"
    if activations.group_size not in (None, 128):
        return "activations with block weights have group_size 128"
    if not weights.symmetric or weights.strategy == "group":
        return "vLLM computes in 8 bits only with symmetric weights and strategy channel or tensor"
    return ""
