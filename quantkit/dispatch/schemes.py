"""The numbers that vLLM builds each layer for: how it matches names and chooses a scheme."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from quantkit.dispatch.layers import VISION, Checkpoint, Layer
from quantkit.formats import declared
from quantkit.numbers import Plain, label
from quantkit.tensorspec import TensorSpec

ACTIVATION_FORMATS = (
    "naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
MODELOPT = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8-block",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4-a16",
    "MXFP8": "mxfp8",
    "MIXED_PRECISION": "mixed",
}
FP8_INPUTS = Plain("float", 8)
MXFP4_FP8 = label(Plain("float", 4, "group", 32), FP8_INPUTS)


@dataclass(frozen=True)
class Scheme:
    """The numbers that vLLM builds a layer for."""

    kind: str
    """A list of kernels."""
    tag: str
    """Identifies and displays the scheme."""
    bits: int = 8
    group_size: int = -1
    symmetric: bool = True
    act_order: bool = False
    static: bool = False
    per_tensor: bool = False


class Unsupported(Exception):
    """vLLM raises on this config; holds the rule and the message."""


@dataclass(frozen=True)
class Judged:
    """One checkpoint in one version of vLLM, on one GPU or on none in particular."""

    checkpoint: Checkpoint
    version: tuple[int, int]
    capability: int | None = None
    """NVIDIA's times ten; None: kernels are not chosen."""
    read: Callable[[TensorSpec], bytes] | None = None
    """Reads scalars; None if there are no files yet."""

    @cached_property
    def section(self) -> Mapping[str, Any]:
        return self.checkpoint.section

    @property
    def method(self) -> str:
        return self.checkpoint.method

    @cached_property
    def groups(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Targets of compressed-tensors in the order of its config, with their group."""
        result = []
        for group in (self.section.get("config_groups") or {}).values():
            targets = group.get("targets") or []
            if len(targets) == 1 and targets[0].endswith("Attention"):
                continue
            result += [(self._mapped(target), group) for target in targets]
        return result

    def _mapped(self, entry: str) -> str:
        """An entry after `apply_vllm_mapper`, which leaves patterns and class names alone."""
        if entry.startswith("re:") or "." not in f"{entry}.".rstrip("."):
            return entry
        return self.checkpoint.inside(entry)

    @cached_property
    def ignore(self) -> list[tuple[str, str]]:
        """Entries that keep layers in 16 bits: as written, and as vLLM maps them."""
        section = self.section
        if self.method == "modelopt":
            inner = section.get("quantization")
            inner = inner if isinstance(inner, dict) else {}
            names = section.get("ignore") or inner.get("exclude_modules") or []
        elif self.method == "compressed-tensors":
            names = section.get("ignore") or []
        elif self.method == "bitsandbytes":
            names = section.get("llm_int8_skip_modules") or []
        else:
            names = section.get("ignored_layers") or section.get("modules_to_not_convert") or []
        return [(str(name), self._mapped(str(name))) for name in names]

    def ignoring(self, inside: str) -> str | None:
        """The entry that keeps a layer in 16 bits, by the rules of its method's config class."""
        if inside in self._exact:
            return self._exact[inside]
        return next((e for e, mapped in self._patterns if self.ignores(mapped, inside)), None)

    @cached_property
    def _exact(self) -> dict[str, str]:
        """Entries by the one module that each names; models with many experts list thousands."""
        return {mapped: entry for entry, mapped in self.ignore if not mapped.startswith("re:")}

    @cached_property
    def _patterns(self) -> list[tuple[str, str]]:
        """Entries that may match modules other than their own name."""
        if self.method != "compressed-tensors":
            return self.ignore
        return [(entry, mapped) for entry, mapped in self.ignore if mapped.startswith("re:")]

    def ignores(self, entry: str, inside: str) -> bool:
        if self.method == "compressed-tensors":
            if entry.startswith("re:"):
                return re.match(entry[3:], inside) is not None
            return entry == inside
        if self.method == "modelopt":
            return entry in inside or fnmatchcase(inside, entry)
        if self.method == "awq":
            return entry in inside
        if self.method == "bitsandbytes":
            return f".{entry}." in f".{inside}."
        if ".experts" in inside and "experts" in entry:
            return inside.partition(".experts")[0] + ".experts" in entry
        return entry == inside

    @cached_property
    def schemes(self) -> dict[str, Scheme | None]:
        """What vLLM builds each linear layer for; None: 16 bits."""
        result: dict[str, Scheme | None] = {}
        fused = {shard: name for name, shards in self.checkpoint.fused for shard in shards}
        shards_of = dict(self.checkpoint.fused)
        for name in self.checkpoint.linears:
            whole = fused.get(name)
            result[name] = self.scheme(name, whole, shards_of.get(whole or "", [name]))
        return result

    def scheme(self, name: str, fused: str | None = None, shards: Iterable[str] = ()) -> (
        Scheme | None
    ):  # fmt: skip
        """What vLLM builds a layer for, under its fused name if it is part of one."""
        if self.method != "compressed-tensors":
            return self._uniform(name)
        inside = self.checkpoint.inside(name)
        if self.ignoring(inside) is not None:
            return None
        is_head = name.rpartition(".")[2] == "lm_head"
        group = self._group(inside, fused, [self.checkpoint.inside(s) for s in shards], is_head)
        if group is None or group.get("weights") is None:
            return None
        return self.of_group(group)

    def of_group(self, group: Mapping[str, Any]) -> Scheme:
        """The scheme of a compressed-tensors group; raises where vLLM does."""
        if id(group) not in self._known:
            form = str(self.section.get("format"))
            self._known[id(group)] = compressed(group, form, self.version, self.capability)
        return self._known[id(group)]

    @cached_property
    def _known(self) -> dict[int, Scheme]:
        return {}

    def _group(
        self, inside: str, fused: str | None, shards: list[str], is_head: bool
    ) -> Mapping[str, Any] | None:
        """`find_matched_target`: the layer's own name, then its class, then its shards'."""
        own = self.checkpoint.inside(fused) if fused else inside
        for target, group in self.groups:
            if is_match(own, target):
                return group
        for target, group in self.groups:
            if target in ("Linear", "FusedMoE", "RoutedExperts") and not is_head:
                return group
        if fused is None:
            return None
        matches = [next((g for t, g in self.groups if is_match(s, t)), None) for s in shards]
        return matches[0] if all(match is not None for match in matches) else None

    def _uniform(self, name: str) -> Scheme | None:
        """For methods with one scheme for all layers."""
        section, inside = self.section, self.checkpoint.inside(name)
        layer = self.checkpoint.linears[name]
        if name.rpartition(".")[2] == "lm_head" and not section.get("lm_head"):
            return None
        if self.method == "gptq":
            bits, size, symmetric = (section.get(k) for k in ("bits", "group_size", "sym"))
            act_order = bool(section.get("desc_act")) and size != -1
            for pattern, change in (section.get("dynamic") or {}).items():
                if not re.match(pattern.removeprefix("-:").removeprefix("+:"), inside):
                    continue
                if pattern.startswith("-:"):
                    return None
                bits, size = change.get("bits", bits), change.get("group_size", size)
                symmetric, act_order = (
                    change.get("sym", symmetric),
                    change.get("desc_act", act_order),
                )
                break
            if not layer.is_quantized:
                return None
            return _integers(int(bits or 4), size, bool(symmetric), bool(act_order))
        if self.method == "awq":
            bits = section.get("w_bit", section.get("bits", 4))
            size = section.get("q_group_size", section.get("group_size"))
            skipped = self.ignore and self.ignoring(inside) is not None
            if skipped or (not self.ignore and not layer.is_quantized):
                return None
            return _integers(int(bits), size, not section.get("zero_point", True), False)
        if self.method == "bitsandbytes":
            if self.ignoring(inside) is not None:
                return None
            bits = 8 if section.get("load_in_8bit") else 4
            kind = "int8" if bits == 8 else str(section.get("bnb_4bit_quant_type") or "fp4")
            return Scheme("bitsandbytes", f"{declared.BITSANDBYTES} {kind.upper()}", bits)
        if self.ignoring(inside) is not None or VISION.search(inside):
            return None
        if self.method in ("fp8", "fbgemm_fp8"):
            if section.get("weight_block_size"):
                return Scheme("fp8-block", _fp8("block"))
            static = section.get("activation_scheme") == "static"
            per_tensor = self.method == "fp8"
            share = "tensor" if per_tensor else "channel"
            return Scheme("fp8", _fp8(share, static), static=static, per_tensor=per_tensor)
        if self.method == "modelopt":
            kind = MODELOPT.get(self.algorithm, "")
            if kind in ("", "mixed"):
                return None if not layer.is_quantized else Scheme(_stored_kind(layer), "mixed")
            bits, size = (4, 16) if kind.startswith("nvfp4") else (8, -1)
            plain = self.algorithm == "FP8"
            tag = _modelopt(self.algorithm)
            return Scheme(kind, tag, bits, size, static=plain, per_tensor=plain)
        return None

    @cached_property
    def algorithm(self) -> str:
        inner = self.section.get("quantization")
        held = inner if isinstance(inner, dict) else self.section
        return str(held.get("quant_algo") or "").upper()


def is_match(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


def _stored_kind(layer: Layer) -> str:
    return "nvfp4" if layer.parts["weight"].dtype == "U8" else "fp8"


def _integer(bits: int, group: int) -> Plain:
    return Plain("int", bits, "channel") if group == -1 else Plain("int", bits, "group", group)


def _fp8(strategy: str, static: bool = False) -> str:
    return label(Plain("float", 8, strategy), FP8_INPUTS, static=static)


def _modelopt(algorithm: str) -> str:
    """The label of one of ModelOpt's algorithms."""
    if algorithm == "MXFP8":
        return label(Plain("float", 8, "group", 32), FP8_INPUTS)
    (bits, kind, strategy, size), inputs = declared.MODELOPT[algorithm]
    held = None if inputs is None else Plain("float", inputs.get("num_bits", 8))
    static = inputs is declared.FP8_TENSOR
    return label(Plain(kind, bits, strategy, size), held, static=static)


def _integers(bits: int, size: Any, symmetric: bool, act_order: bool) -> Scheme:
    group = -1 if size in (None, -1, 0) else int(size)
    tag = label(_integer(bits, group), None, symmetric) + " act-order" * act_order
    return Scheme("wna16", tag, bits, group, symmetric, act_order)


def compressed(
    group: Mapping[str, Any], form: str, version: tuple[int, int], capability: int | None
) -> Scheme:
    """`_get_scheme_from_parts`: the scheme of one group; raises where vLLM does."""
    weights, inputs = group["weights"], group.get("input_activations")
    form = group.get("format") or form
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if size and size > 0 else "tensor")
    symmetric = weights.get("symmetric", True) is not False
    is_float = kind == "float"
    if is_float and bits == 4 and strategy == "tensor_group" and size == 16:
        if inputs is not None and inputs.get("strategy") != "tensor_group":
            raise Unsupported("no-scheme", "NVFP4 weights with inputs that are not NVFP4")
        nvfp4 = Plain("float", 4, strategy, size)
        kind = "nvfp4" if inputs else "nvfp4-a16"
        return Scheme(kind, label(nvfp4, nvfp4 if inputs else None), 4, 16)
    if is_float and strategy == "group" and size == 32 and bits in (4, 8):
        if bits == 8 and str(weights.get("scale_dtype")).removeprefix("torch.") != "uint8":
            raise Unsupported("no-scheme", "FP8 in groups of 32 without scale_dtype torch.uint8")
        held = Plain("float", inputs.get("num_bits", 8)) if inputs else None
        name = f"mxfp{bits}" if inputs or bits == 8 else "mxfp4-a16"
        return Scheme(name, label(Plain("float", bits, "group", 32), held), bits, 32)
    order = weights.get("actorder")
    act_order = order in ("group", "dynamic", True)
    if inputs and bits == 4 and kind == "int" and inputs.get("type") == "float":
        if capability in (None, 90) and strategy == "group":
            tag = label(Plain("int", 4, "group", size), FP8_INPUTS, symmetric)
            return Scheme("w4afp8", tag, 4, size or -1, symmetric, act_order)
        raise Unsupported(
            "no-scheme", "4-bit integers with FP8 inputs run on compute capability 9.0 alone"
        )
    if inputs and version >= (0, 26) and _has_integer_inputs(weights, inputs, form, strategy):
        held = Plain("int", inputs.get("num_bits", 8))
        tag = label(Plain("int", bits, strategy, size), held, symmetric)
        return Scheme("int-inputs", tag, bits, size or -1, symmetric)
    if not inputs and kind == "int" and strategy in ("channel", "group"):
        if form != "pack-quantized":
            raise Unsupported("no-scheme", f"weight-only integers in format {form}")
        allowed = (4, 8) if version < (0, 25) else (2, 3, 4, 5, 6, 7, 8)
        if bits not in allowed:
            raise Unsupported("width", f"{bits}-bit integers; vLLM reads {_listed(allowed)}")
        if not symmetric and bits not in (4, 8):
            raise Unsupported("width", f"{bits}-bit integers with zero points")
        return _integers(bits, size, symmetric, act_order)
    if form in ACTIVATION_FORMATS:
        if is_float and bits == 8 and symmetric and strategy in ("tensor", "channel", "block"):
            if not inputs:
                return Scheme("fp8-a16", label(Plain("float", 8, strategy), None))
            static = not inputs.get("dynamic")
            if strategy == "block":
                return Scheme("fp8-block", _fp8("block"))
            if not static or inputs.get("strategy") in (None, "tensor"):
                per_tensor = strategy == "tensor"
                return Scheme("fp8", _fp8(strategy, static), static=static, per_tensor=per_tensor)
        if inputs and kind == "int" and bits == inputs.get("num_bits", 8) == 8 and symmetric:
            fits = inputs.get("strategy") == ("token" if inputs.get("dynamic") else "tensor")
            if strategy in ("tensor", "channel") and fits:
                static = not inputs.get("dynamic")
                tag = label(Plain("int", 8, strategy), Plain("int", 8), static=static)
                return Scheme("int8", tag, static=static)
    numbers = f"{'fp' if is_float else kind}{bits} {strategy}"
    rounded = "16-bit inputs" if not inputs else f"{inputs.get('num_bits', 8)}-bit inputs"
    raise Unsupported("no-scheme", f"{numbers} with {rounded} in format {form}")


def _has_integer_inputs(
    weights: Mapping[str, Any], inputs: Mapping[str, Any], form: str, strategy: str
) -> bool:
    """`_is_wNaM_int`: packed integers times dynamic integers, which Humming multiplies."""
    return (
        form == "pack-quantized"
        and weights.get("type", "int") == "int"
        and strategy in ("channel", "group")
        and inputs.get("type", "int") == "int"
        and inputs.get("num_bits", 8) in (4, 8)
        and inputs.get("symmetric", True) is not False
        and bool(inputs.get("dynamic"))
        and inputs.get("strategy") in ("token", "group")
    )


def _listed(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last} bits"


def scheme_of(judged: Judged, name: str) -> Scheme | None:
    """Also None if `_groups` has already reported that there is none."""
    try:
        return judged.schemes[name]
    except Unsupported:
        return None


def is_readable(judged: Judged) -> bool:
    try:
        return bool(judged.schemes) or not judged.checkpoint.linears
    except Unsupported:
        return False


def columns_of(layer: Layer, scheme: Scheme) -> int | None:
    """Columns derived from the scales; None if they do not show it."""
    scale = layer.parts.get("weight_scale") or layer.parts.get("scales")
    if scale is None or len(scale.shape) != 2 or scheme.group_size < 1:
        return None
    return scheme.group_size * (scale.shape[1] if "weight_scale" in layer.parts else scale.shape[0])
