"""The type of every tensor in a GGUF file: the mixtures that names such as Q4_K_M stand for.

A file type names the type of most weights. Those that suffer most from rounding get more bits: the
output, the attention's values, and the MLP's down projection in the first and last eighth of the
layers and in every third in between. The rules are those of llama.cpp's quantiser, so a file has
the size and the types that people expect from its name. Its exceptions for Falcon are left out.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quantkit.errors import RecipeError, SourceError, UnknownName
from quantkit.gguf.names import GGML_QUANT_SIZES, LlamaFileType
from quantkit.gguf.names import GGMLQuantizationType as Kind

BASE = {
    "F32": Kind.F32,
    "F16": Kind.F16,
    "BF16": Kind.BF16,
    "Q4_0": Kind.Q4_0,
    "Q4_1": Kind.Q4_1,
    "Q5_0": Kind.Q5_0,
    "Q5_1": Kind.Q5_1,
    "Q8_0": Kind.Q8_0,
    "Q2_K": Kind.Q2_K,
    "Q3_K_S": Kind.Q3_K,
    "Q3_K_M": Kind.Q3_K,
    "Q3_K_L": Kind.Q3_K,
    "Q4_K_S": Kind.Q4_K,
    "Q4_K_M": Kind.Q4_K,
    "Q5_K_S": Kind.Q5_K,
    "Q5_K_M": Kind.Q5_K,
    "Q6_K": Kind.Q6_K,
    "IQ4_NL": Kind.IQ4_NL,
    "IQ4_XS": Kind.IQ4_XS,
    "MXFP4_MOE": Kind.MXFP4,
    "NVFP4": Kind.NVFP4,
}
"""The type of most weights, by file type."""

FILE_TYPES = {
    name: int(LlamaFileType["ALL_F32" if name == "F32" else f"MOSTLY_{name}"]) for name in BASE
}
"""The number stored as `general.file_type`."""

UNQUANTISED = (Kind.F32, Kind.F16, Kind.BF16)
KINDS = {kind.name: kind for kind in BASE.values()}

# For rows that are not a multiple of 256. IQ4_NL is as large as Q4_0, llama.cpp's later choice for
# Q2_K and Q3_K, and rounds better.
FALLBACKS = {
    Kind.Q2_K: Kind.IQ4_NL,
    Kind.Q3_K: Kind.IQ4_NL,
    Kind.IQ4_XS: Kind.IQ4_NL,
    Kind.Q4_K: Kind.Q5_0,
    Kind.Q5_K: Kind.Q5_1,
    Kind.Q6_K: Kind.Q8_0,
}

# Two-dimensional weights that are small or route among experts.
KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|^position_embd\.weight$|^token_types\.weight$"
    r"|\.position_embd|\.patch_embd|\.rel_pos|attn_rel_b\.weight|ssm_conv1d|shortconv\.conv\.weight"
    r"|altup|laurel|per_layer_model_proj"
    r"|time_mix_(first|[wva][012]|g[12]|decay_w[12]|lerp_fused)\.weight"
)
VALUES = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")
DOWN, KEYS, ATTENTION_OUTPUT = ("ffn_down",), ("attn_k.weight",), ("attn_output.weight",)
ROLES = (VALUES, DOWN, KEYS, ATTENTION_OUTPUT)
"""The roles that the rules look for in a name, in their order."""
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
OUTER = ("output.weight", *EMBEDDINGS)
LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Choice:
    """The type of one tensor."""

    kind: Kind
    fallback_from: Kind | None = None
    """What the mixture asks for, where the tensor's columns are not a multiple of its block size.
    """


def choose(
    file_type: str,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, Any],
    has_importance: bool,
    overrides: Mapping[str, str] | None = None,
) -> dict[str, Choice]:
    """The type of every tensor, given by GGUF name and shape in torch's order.

    An override is a regular expression, searched for in the name, and a type for what it matches;
    the first match counts. As in llama.cpp, an overridden tensor does not count as a layer in the
    rules for the rest.
    """
    if file_type not in BASE:
        raise UnknownName("file type", file_type, BASE)
    patterns = _compiled(overrides or {})
    used: set[str] = set()
    rules = _Rules(file_type, [name for name, _ in tensors], metadata, has_importance)
    choices = {}
    # The rules count layers, so they need the tensors in file order.
    for name, shape in sorted(tensors, key=lambda tensor: (_layer(tensor[0]), tensor[0])):
        if not quantised(name, shape):
            choices[name] = Choice(Kind.F32)
            continue
        match = next((p for p in patterns if p.search(name)), None)
        if match:
            used.add(match.pattern)
            kind = patterns[match]
        else:
            kind = rules.kind(name)
        choices[name] = _fitted(kind, shape[-1])
    for pattern in patterns:
        if pattern.pattern not in used:
            raise RecipeError(
                f"the override '{pattern.pattern}' matches no tensor that is quantised, such as "
                "blk.0.ffn_down.weight, or an earlier override takes it"
            )
    return {name: choices[name] for name, _ in tensors}


@lru_cache(1 << 16)
def quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor takes the file's type; norms, biases and other small ones stay in F32."""
    # llama.cpp ignores a leading dimension of one.
    while shape and shape[0] == 1:
        shape = shape[1:]
    return len(shape) >= 2 and name.endswith("weight") and not KEPT.search(name)


@lru_cache(1 << 10)
def _fitted(kind: Kind, columns: int) -> Choice:
    """The type itself, or its fallback when the columns are not a multiple of the block size."""
    found = kind
    while columns % GGML_QUANT_SIZES[found][0]:
        found = FALLBACKS.get(found, Kind.F16)
    return Choice(found, kind if found != kind else None)


def _compiled(overrides: Mapping[str, str]) -> dict[re.Pattern[str], Kind]:
    found = {}
    for pattern, name in overrides.items():
        if name.upper() not in KINDS:
            raise UnknownName("tensor type", name, KINDS)
        try:
            found[re.compile(pattern)] = KINDS[name.upper()]
        except re.error as error:
            raise RecipeError(
                f"the override '{pattern}' is not a regular expression: {error}"
            ) from error
    return found


@lru_cache(1 << 16)
def _role(name: str) -> tuple[str, ...] | None:
    """The first of `ROLES` with a part that occurs in a name."""
    return next((role for role in ROLES if any(part in name for part in role)), None)


@lru_cache(1 << 16)
def _layer(name: str) -> int:
    match = LAYER.match(name)
    return int(match[1]) if match else -1


def _more_bits(layer: int, n_layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or every third in between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


class _Rules:
    """The state that llama.cpp keeps while it walks through a model's tensors."""

    def __init__(
        self, file_type: str, names: Sequence[str], metadata: Mapping[str, Any], importance: bool
    ) -> None:
        self._type = file_type
        self._base = BASE[file_type]
        self._importance = importance
        self._tied = "output.weight" not in names
        self._n_values = sum(_role(name) == VALUES for name in names)
        self._values_seen = 0
        self._downs_seen = 0
        family = metadata.get("general.architecture")
        n_layers = metadata.get(f"{family}.block_count")
        if type(n_layers) is not int:
            raise SourceError(
                f"the metadata lack {family}.block_count, which decides the types of the layers"
            )
        self._n_layers = n_layers
        self._n_experts = int(metadata.get(f"{family}.expert_count", 0))
        heads = _first(metadata.get(f"{family}.attention.head_count", 0))
        shared = _first(metadata.get(f"{family}.attention.head_count_kv", heads))
        self._heads_per_value = heads // shared if shared else 0
        # A 70B model by llama.cpp's heuristic.
        self._large = n_layers == 80 and (
            family in ("qwen2", "deci", "olmo") or (family == "llama" and heads != shared)
        )

    def kind(self, name: str) -> Kind:
        if self._base in UNQUANTISED:
            return self._base
        if self._base == Kind.NVFP4:  # converted: tensors outside the layers keep the model's type
            return Kind.BF16 if name in OUTER else self._base
        if self._base == Kind.MXFP4:  # by name, since layers of latent attention are stacked too
            return self._base if "_exps." in name else Kind.Q8_0
        if name == "output.weight" or (self._tied and name in EMBEDDINGS):
            return Kind.Q8_0 if self._base == Kind.Q8_0 else Kind.Q6_K
        role = _role(name)
        if role == VALUES:
            kind = self._attention_values()
            self._values_seen += 1
            return kind
        if role == DOWN:
            kind = self._down(name)
            self._downs_seen += 1
            return kind
        if role == KEYS and self._n_experts == 8:
            return Kind.Q8_0
        if role == ATTENTION_OUTPUT:
            return self._attention_output()
        return self._base

    def _attention_values(self) -> Kind:
        # Small where several heads share them, and everything that attention passes on depends on
        # them.
        if self._n_experts == 8:
            return Kind.Q8_0
        seen, grouped = self._values_seen, self._heads_per_value >= 4
        kind = self._base
        match self._type:
            case "Q2_K":
                kind = Kind.Q4_K if grouped else Kind.Q3_K
            case "Q3_K_M":
                kind = Kind.Q5_K if seen < 2 else Kind.Q4_K
            case "Q3_K_L":
                kind = Kind.Q5_K
            case "Q4_K_S" if seen < 4:
                kind = Kind.Q5_K
            case "Q4_K_M" | "Q5_K_M" if _more_bits(seen, self._n_values):
                kind = Kind.Q6_K
            case "IQ4_NL" | "IQ4_XS" if grouped:
                kind = Kind.Q5_K
        return Kind.Q5_K if self._large and kind in (Kind.Q3_K, Kind.Q4_K) else kind

    def _down(self, name: str) -> Kind:
        layer, n = self._downs_seen, self._n_layers
        if self._n_experts > 1:
            # Several tensors per layer: only the name says which layer it is.
            layer = _layer(name)
            if not 0 <= layer < n:
                raise SourceError(f"tensor {name} is not in any of the model's {n} layers")
        early = layer < n // 8
        match self._type:
            case "Q2_K":
                return Kind.Q3_K
            case "Q3_K_M":
                return Kind.Q5_K if layer < n // 16 else Kind.Q4_K
            case "Q3_K_L":
                return Kind.Q5_K
            case "Q4_K_S" if early:
                return Kind.Q5_K
            case "Q4_K_M" | "Q5_K_M" if _more_bits(layer, n):
                return Kind.Q6_K
            case "IQ4_NL" | "IQ4_XS" if early and not self._importance:
                return Kind.Q5_K
            # Without an offset the first layers may degrade badly; llama.cpp acts only with
            # importance.
            case "Q4_0" if early and self._importance:
                return Kind.Q4_1
            case "Q5_0" if early and self._importance:
                return Kind.Q5_1
        return self._base

    def _attention_output(self) -> Kind:
        if self._n_experts == 8:
            fewer = self._base in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.IQ4_NL, Kind.IQ4_XS)
            return Kind.Q5_K if fewer and self._type != "Q3_K_L" else self._base
        raised = {"Q2_K": Kind.Q3_K, "Q3_K_M": Kind.Q4_K, "Q3_K_L": Kind.Q5_K}
        return raised.get(self._type, self._base)


def _first(value: Any) -> int:
    """A number that may be given per layer; llama.cpp takes the first layer's."""
    return int(value[0] if isinstance(value, list | tuple) else value)
