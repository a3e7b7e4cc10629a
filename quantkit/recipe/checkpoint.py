"""A recipe for vLLM: a checkpoint in the words of compressed-tensors."""

import re
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from quantkit import methods, resources
from quantkit.errors import RecipeError, UnknownName
from quantkit.formats import COMPRESSED_TENSORS, FORMATS, find
from quantkit.recipe import files
from quantkit.recipe.named import Named
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme
from quantkit.specs import meant

AUTO_GROUP_SIZES = (128, 64, 32)


class Recipe(Named):
    """A checkpoint in the words of compressed-tensors."""

    method: str
    """How weights are chosen: see `quantkit.methods`."""
    weights: WeightScheme
    input_activations: ActivationScheme | None = None
    """None leaves activations in 16 bits."""
    kv_cache: KVCacheScheme | None = None
    """None leaves the cache to the serving engine."""
    format: str = COMPRESSED_TENSORS
    """The form of the files: compressed-tensors, gptq, awq or fp8."""
    targets: list[str] = Field(["Linear"])
    """Class name, module name, or `re:` and a pattern."""
    ignore: list[str] = Field(["lm_head"])
    """Modules left alone, in the same notation."""
    options: dict[str, Any] = Field({})
    """Settings of the method."""

    # Rules sit on fields, not on the whole, so that one broken field does not hide another.
    @field_validator("method")
    @classmethod
    def _known(cls, method: str) -> str:
        if method not in methods.METHODS and method not in (known := methods.names()):
            raise ValueError(f"'{method}' is unknown; {meant(method, known)}")
        methods.find(method)  # another package's may be broken
        return method

    @field_validator("weights")
    @classmethod
    def _fits(cls, weights: WeightScheme, info: ValidationInfo) -> WeightScheme:
        method = info.data.get("method")
        if method and weights.type not in methods.find(method).types:
            raise ValueError(f"method {method} rounds to integers; FP8 goes with method rtn")
        return weights

    @field_validator("input_activations")
    @classmethod
    def _alike(
        cls, activations: ActivationScheme | None, info: ValidationInfo
    ) -> ActivationScheme | None:
        weights = info.data.get("weights")
        if activations is None or weights is None:
            return activations
        if (weights.type, weights.num_bits) != (activations.type, 8):
            raise ValueError("activations need 8-bit weights of the same type")
        if (weights.strategy == "block") != (activations.strategy == "group"):
            raise ValueError("weights in blocks go with activations in groups, and only with them")
        if not weights.symmetric or weights.strategy == "group":
            raise ValueError(
                "vLLM computes in 8 bits only with symmetric weights and strategy channel or tensor"
            )
        return activations

    @field_validator("format")
    @classmethod
    def _holds(cls, format: str, info: ValidationInfo) -> str:
        if format not in FORMATS:
            raise ValueError(f"'{format}' is unknown; {meant(format, FORMATS)}")
        parts = [info.data.get(key) for key in ("weights", "input_activations", "kv_cache")]
        weights, activations, kv_cache = parts
        if weights and (reason := find(format).objection(weights, activations, kv_cache)):
            raise ValueError(reason)
        return format

    @field_validator("targets", "ignore")
    @classmethod
    def _compiles(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ValueError(f"'{pattern}' is no valid pattern: {error}") from error
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
        """A recipe by name, or from the user's own file; `+kv-fp8` behind either adds to it."""
        base, addition = files.split_addition(name)
        if addition is not None:
            files.require_addition(addition)
            return cls.load(base).with_kv_cache(addition)
        path = resources.find("recipes", name)
        data = files.content(path)
        if "gguf" in data:
            raise RecipeError(f"recipe {name} makes a GGUF file, which does not belong here")
        return cls.validated({"name": path.stem, **data}, path)

    def with_kv_cache(self, addition: str) -> "Recipe":
        """The same with an FP8 KV cache."""
        if self.kv_cache is not None:
            raise RecipeError(f"recipe {self.name} has an FP8 KV cache already")
        added = {
            "name": f"{self.name}+{addition}",
            "summary": f"{self.name} with an FP8 KV cache, whose scales come from calibration",
            "kv_cache": {},
        }
        return Recipe.validated(self.model_dump() | added, f"{self.name}+{addition}")

    def in_format(self, format: str) -> "Recipe":
        """The same numbers in files of another form, under a name that tells it."""
        if format not in FORMATS:
            raise UnknownName("format", format, FORMATS)
        if format == self.format:
            return self
        parts = self.weights, self.input_activations, self.kv_cache
        if reason := find(format).objection(*parts):
            raise RecipeError(f"recipe {self.name} cannot be written as {format}: {reason}")
        name = self.name.removesuffix(f"-{self.format}")
        if format != COMPRESSED_TENSORS:
            name = f"{name}-{format}"
        return Recipe.validated(self.model_dump() | {"name": name, "format": format}, name)

    @property
    def needs_calibration(self) -> bool:
        """Whether the recipe learns from data."""
        learnt = methods.find(self.method).calibrated or self.kv_cache is not None
        return learnt or self.has_static_inputs

    @property
    def has_static_inputs(self) -> bool:
        """Whether activations have fixed scales, which are stored."""
        return self.input_activations is not None and not self.input_activations.dynamic

    @property
    def smooths(self) -> bool:
        """Whether the recipe scales input channels and folds the inverse elsewhere."""
        return methods.find(self.method).smoothing is not None

    @property
    def propagates(self) -> bool:
        """Whether later blocks see this recipe's own quantised outputs."""
        return bool(self.options.get("propagate", methods.find(self.method).propagates))

    def resolved(self, columns: dict[str, int]) -> tuple["Recipe", str]:
        """This recipe with a concrete group size, and a word on the choice.

        `columns` holds the width of every layer that the recipe means.
        """
        if self.weights.strategy != "group":
            return self, ""
        asked = self.weights.group_size
        sizes = (asked,) if isinstance(asked, int) else AUTO_GROUP_SIZES
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
        cache = "in the engine's own type; +kv-fp8 behind the recipe's name makes it FP8"
        if self.kv_cache is not None:
            cache = self.kv_cache.words()
        form = "" if self.format == COMPRESSED_TENSORS else f" Files in {self.format} form."
        data = "needs calibration" if self.needs_calibration else "needs no data"
        return (
            f"Weights: {self.weights.words()}. {activations}.\n"
            f"KV cache: {cache}.\n"
            f"Method: {self.method} ({methods.find(self.method).summary}); {data}. "
            f"Layers: {', '.join(self.targets)} but {', '.join(self.ignore) or 'none'}.{form}"
        )

    def _decisive(self, content: dict[str, Any]) -> dict[str, Any]:
        # So that recipes without these keep the digest they always had.
        usual = {"kv_cache": None, "format": COMPRESSED_TENSORS}
        return {k: value for k, value in content.items() if k not in usual or value != usual[k]}
