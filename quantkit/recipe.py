"""A recipe: what to do to weights and activations, in the words of compressed-tensors.

Which calibration set a run uses is the run's business. Unknown keys are refused, and all problems
of a file are listed at once.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from quantkit import resources
from quantkit.errors import RecipeError, UnknownName
from quantkit.formats import COMPRESSED_TENSORS, FORMATS, objection
from quantkit.registry import METHODS, check_options
from quantkit.specs import meant, problems, read_yaml

AUTO_GROUP_SIZES = (128, 64, 32)
BLOCK_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K",
    "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""What one tensor of a GGUF file can be stored in."""
GGUF_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S",
    "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""llama.cpp's mixtures of them that we write."""


class Strict(BaseModel):
    """Frozen, and without room for misspelt keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class WeightScheme(Strict):
    """The numbers that weights are rounded to."""

    num_bits: int
    """Bits a stored weight takes: 4 or 8."""
    type: Literal["int", "float"] = "int"
    """Evenly spaced integers, or FP8 (E4M3)."""
    symmetric: bool = True
    """Without zero points. FP8 is always symmetric."""
    strategy: Literal["tensor", "channel", "group", "block"] = "group"
    """What shares one scale: the tensor, a row, `group_size` weights of a row, or a block."""
    group_size: int | Literal["auto"] | None = None
    """Weights that share a scale; `auto` is 128, 64 or 32, the first that divides every layer."""
    block_structure: tuple[Literal[128], Literal[128]] | None = None
    """Rows and columns of a block: 128 x 128, the size that engines have kernels for."""

    @field_validator("num_bits")
    @classmethod
    def _served(cls, bits: int) -> int:
        if bits == 3:
            raise ValueError("3 bits: vLLM has no fast kernel for it; use 4, or a GGUF type")
        if bits not in (4, 8):
            raise ValueError(f"{bits} bits: choose 4 or 8")
        return bits

    @field_validator("type", mode="before")
    @classmethod
    def _stored(cls, kind: Any) -> Any:
        if str(kind).lower() == "nf4":
            raise ValueError("nf4: a run-time format of bitsandbytes; use int with 4 bits")
        return kind

    @model_validator(mode="after")
    def _consistent(self) -> "WeightScheme":
        if self.type == "float" and (self.num_bits != 8 or not self.symmetric):
            raise ValueError("type float means FP8: num_bits 8 and symmetric true")
        if self.type == "float" and self.strategy == "group":
            raise ValueError("vLLM has no FP8 kernel with groups; use channel, tensor or block")
        if (self.strategy == "block") != (self.block_structure is not None):
            raise ValueError("block_structure goes with strategy block, and only with it")
        if self.strategy == "block" and self.type != "float":
            raise ValueError("blocks are for FP8: type float")
        if self.type == "int" and self.strategy == "tensor":
            raise ValueError("integers with one scale a tensor lose too much; use channel or group")
        if (self.strategy == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with strategy group, and only with it")
        if isinstance(self.group_size, int) and self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size {self.group_size}: vLLM takes 32, 64 or 128 (or auto)")
        return self


class ActivationScheme(Strict):
    """The numbers that a layer's inputs are rounded to at run time."""

    num_bits: Literal[8] = 8
    type: Literal["int", "float"]
    symmetric: Literal[True] = True
    strategy: Literal["token", "tensor", "group"]
    """One scale for each token, one for all, or one for 128 channels of each token."""
    group_size: Literal[128] | None = None
    """Channels that share a scale; goes with strategy group."""
    dynamic: bool
    """Scales measured at run time; otherwise they come from calibration."""

    @model_validator(mode="after")
    def _consistent(self) -> "ActivationScheme":
        if self.dynamic == (self.strategy == "tensor"):
            raise ValueError("strategy tensor goes with dynamic false, token and group with true")
        if (self.strategy == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with strategy group, and only with it")
        return self


class KVCacheScheme(Strict):
    """The numbers that keys and values are kept in: FP8 with fixed scales, as vLLM serves it."""

    num_bits: Literal[8] = 8
    type: Literal["float"] = "float"
    symmetric: Literal[True] = True
    strategy: Literal["tensor"] = "tensor"
    """One scale for the keys of a layer and one for its values ..."""
    dynamic: Literal[False] = False
    """... which come from calibration."""


ADDITIONS = {"kv-fp8": "keeps keys and values of attention in FP8, with scales from calibration"}
"""What can stand behind a recipe's name, after a plus."""


class _Named(Strict):
    """What every file of `recipes/` has."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)
    """The file's name without its ending."""
    summary: str
    """One line: what it is for."""
    demo: bool = False
    """Takes part in `quantkit demo`."""

    def public(self) -> dict[str, Any]:
        """What the recipe says, as plain data."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """A hash of everything that decides the result."""
        content = self.model_dump(mode="json", exclude={"name", "summary", "demo"})
        canonical = json.dumps(self._decisive(content), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _decisive(self, content: dict[str, Any]) -> dict[str, Any]:
        return content

    @classmethod
    def read(cls, path: Path) -> Self:
        """A recipe from a file; every problem is listed."""
        return cls.validated({"name": path.stem, **_read(path)}, path)

    @classmethod
    def validated(cls, data: dict[str, Any], where: str | Path) -> Self:
        """A recipe from plain data that was found somewhere."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            told = "\n".join(f"  {line}" for line in problems(error, cls))
            raise RecipeError(f"{where} is not a valid recipe:\n{told}") from error


class GGUFRecipe(_Named):
    """A file for llama.cpp: one of its mixtures of block types."""

    gguf: str
    """The mixture, by llama.cpp's name."""
    tensors: dict[str, str] = {}
    """Other types for some tensors, by patterns that their GGUF names contain."""

    needs_calibration: ClassVar[bool] = False
    """It learns from data where there is some, and does without where there is none."""

    @field_validator("gguf", mode="before")
    @classmethod
    def _known(cls, kind: Any) -> str:
        name = str(kind).upper()
        if name not in GGUF_TYPES:
            hint = meant(name, GGUF_TYPES)
            raise ValueError(f"'{kind}' is no file type of llama.cpp's that we write; {hint}")
        return name

    @field_validator("tensors")
    @classmethod
    def _types(cls, tensors: dict[str, str]) -> dict[str, str]:
        for pattern, kind in tensors.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{pattern}' is no valid pattern: {error}") from error
            if kind.upper() not in BLOCK_TYPES:
                raise ValueError(f"'{kind}' is no block type; there are: {', '.join(BLOCK_TYPES)}")
        return {pattern: kind.upper() for pattern, kind in tensors.items()}

    def explain(self) -> str:
        """What the recipe does, in words."""
        others = ", ".join(f"{kind} for {pattern}" for pattern, kind in self.tensors.items())
        return (
            f"One GGUF file of type {self.gguf} for llama.cpp and what is built on it, with types "
            f"chosen tensor by tensor as llama.cpp does{f', but {others}' if others else ''}.\n"
            "Needs no data; with --calibration or --imatrix errors are weighted by what inputs "
            "matter."
        )


class Recipe(_Named):
    """A checkpoint in the words of compressed-tensors."""

    method: str
    """How weights are chosen: see `quantkit.registry`."""
    weights: WeightScheme
    input_activations: ActivationScheme | None = None
    """None leaves activations in 16 bits."""
    kv_cache: KVCacheScheme | None = None
    """None leaves the cache to the serving engine."""
    format: str = COMPRESSED_TENSORS
    """The form of the files: compressed-tensors, gptq, awq or fp8."""
    targets: list[str] = ["Linear"]
    """Class name, module name, or `re:` and a pattern."""
    ignore: list[str] = ["lm_head"]
    """Modules left alone, in the same notation."""
    options: dict[str, Any] = {}
    """Settings of the method."""

    # Rules sit on fields, not on the whole, so that one broken field does not hide another.
    @field_validator("method")
    @classmethod
    def _known(cls, method: str) -> str:
        if method not in METHODS:
            raise ValueError(f"'{method}' is unknown; {meant(method, METHODS)}")
        return method

    @field_validator("weights")
    @classmethod
    def _fits(cls, weights: WeightScheme, info: ValidationInfo) -> WeightScheme:
        entry = METHODS.get(info.data.get("method", ""))
        if entry is not None and weights.type == "float" and entry.rounding != "rtn":
            raise ValueError(
                f"method {info.data['method']} rounds to integers; FP8 goes with method rtn"
            )
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
        if weights and (reason := objection(format, weights, activations, kv_cache)):
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
        if (method := info.data.get("method")) and (wrong := check_options(method, options)):
            raise ValueError("; ".join(wrong))
        return options

    @classmethod
    def load(cls, name: str) -> "Recipe":
        """A recipe by name, or from the user's own file; `+kv-fp8` behind either adds to it."""
        recipe = load(name)
        if not isinstance(recipe, cls):
            raise RecipeError(f"recipe {name} makes a GGUF file, which does not belong here")
        return recipe

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
        if reason := objection(format, self.weights, self.input_activations, self.kv_cache):
            raise RecipeError(f"recipe {self.name} cannot be written as {format}: {reason}")
        name = self.name.removesuffix(f"-{self.format}")
        if format != COMPRESSED_TENSORS:
            name = f"{name}-{format}"
        return Recipe.validated(self.model_dump() | {"name": name, "format": format}, name)

    @property
    def needs_calibration(self) -> bool:
        """Whether the recipe learns from data."""
        static = self.input_activations is not None and not self.input_activations.dynamic
        return METHODS[self.method].calibrated or static or self.kv_cache is not None

    @property
    def smooths(self) -> bool:
        """Whether the recipe scales input channels and folds the inverse elsewhere."""
        return METHODS[self.method].smoothing is not None

    @property
    def propagates(self) -> bool:
        """Whether later blocks see this recipe's own quantised outputs."""
        return bool(self.options.get("propagate", METHODS[self.method].propagates))

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
        weights = self.weights
        grid = "FP8 (E4M3)" if weights.type == "float" else f"{weights.num_bits}-bit integers"
        share = {
            "tensor": "one scale a tensor",
            "channel": "one scale a row",
            "block": "one scale a block of 128 x 128",
            "group": f"one scale for {weights.group_size} weights of a row"
            if weights.group_size != "auto"
            else "one scale for 128, 64 or 32 weights of a row, the first that divides every layer",
        }[weights.strategy]
        zero = "" if weights.symmetric else ", with zero points"
        inputs = self.input_activations
        if inputs is None:
            activations = "Activations stay in 16 bits."
        else:
            kind = "FP8 (E4M3)" if inputs.type == "float" else "8-bit integers"
            when = "measured at run time" if inputs.dynamic else "from calibration"
            share_of_inputs = (
                "128 channels of each token" if inputs.group_size else f"each {inputs.strategy}"
            )
            activations = f"Activations: {kind}, one scale for {share_of_inputs}, {when}."
        cache = (
            "in the engine's own type; +kv-fp8 behind the recipe's name makes it FP8"
            if self.kv_cache is None
            else "FP8 (E4M3), one scale for the keys and one for the values of each layer, "
            "from calibration"
        )
        form = "" if self.format == COMPRESSED_TENSORS else f" Files in {self.format} form."
        data = "needs calibration" if self.needs_calibration else "needs no data"
        return (
            f"Weights: {grid}, {share}{zero}. {activations}\n"
            f"KV cache: {cache}.\n"
            f"Method: {self.method} ({METHODS[self.method].summary}); {data}. "
            f"Layers: {', '.join(self.targets)} but {', '.join(self.ignore) or 'none'}.{form}"
        )

    def _decisive(self, content: dict[str, Any]) -> dict[str, Any]:
        # So that recipes without these keep the digest they always had.
        usual = {"kv_cache": None, "format": COMPRESSED_TENSORS}
        return {k: value for k, value in content.items() if k not in usual or value != usual[k]}


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
    kind: type[AnyRecipe] = GGUFRecipe if "gguf" in _read(path) else Recipe
    return kind.read(path)


def _read(path: Path) -> dict[str, Any]:
    data = read_yaml(path, RecipeError)
    if not isinstance(data, dict):
        raise RecipeError(f"{path} is no recipe: it must be a list of `key: value` lines")
    return data


def split_addition(name: str) -> tuple[str, str | None]:
    """A recipe's name or path, and what stands behind its last plus; a path may hold one too."""
    base, plus, addition = name.rpartition("+")
    if not plus or "/" in addition or addition.endswith((".yaml", ".yml")):
        return name, None
    return base, addition
