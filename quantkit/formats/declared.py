"""Parses the quantisation config of other tools' checkpoints: the numbers of each layer, the maker.

Every quantiser writes `quantization_config` in its own terms; here they become one form. Anything
unknown is refused, since a guess would be scored and served as if it were the model.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from quantkit import numbers
from quantkit.errors import CheckpointError
from quantkit.schemes import ActivationScheme, runs_as

EVERY = ("Linear",)
BITSANDBYTES = "bitsandbytes"
FP8_TOKEN = {"type": "float", "strategy": "token", "dynamic": True}
FP8_TENSOR = {"type": "float", "strategy": "tensor", "dynamic": False}
FP8_GROUPS = {"type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
NVFP4_INPUTS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
    "dynamic": "local",
}  # fmt: skip
MODELOPT: dict[str, tuple[tuple[int, str, str, int | None], dict[str, Any] | None]] = {
    "FP8": ((8, "float", "tensor", None), FP8_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": ((8, "float", "channel", None), FP8_TOKEN),
    "FP8_PB_WO": ((8, "float", "block", None), FP8_GROUPS),
    "NVFP4": ((4, "float", "tensor_group", 16), NVFP4_INPUTS),
    "NVFP4_AWQ": ((4, "float", "tensor_group", 16), NVFP4_INPUTS),
    "W4A16_NVFP4": ((4, "float", "tensor_group", 16), None),
}
"""Its algorithms: bits, type, strategy and group size of weights, and the numbers of inputs."""
MAKERS = {
    "llm-compressor": ("llm-compressor", "llmcompressor"),
    "AutoRound": ("auto-round", "autoround"),
    "GPTQModel": ("gptqmodel",),
    "AutoGPTQ": ("auto_gptq", "autogptq", "auto-gptq"),
    "AutoAWQ": ("autoawq",),
    "ModelOpt": ("modelopt", "model optimizer"),
    "AutoFP8": ("autofp8",),
    "Unsloth": ("unsloth",),
}
"""Quantisers, and their names in configs and model cards."""


@dataclass(frozen=True)
class Weights:
    """The numbers of a layer's weight; covers more than recipes do."""

    num_bits: int
    type: str
    strategy: str
    group_size: int | None = None
    symmetric: bool = True
    kind: str = ""
    """A number format that no recipe has: a ggml type, or one of bitsandbytes."""


@dataclass(frozen=True)
class Part:
    """Layers that are declared alike."""

    targets: tuple[str, ...]
    weights: Weights
    inputs: ActivationScheme | None = None
    """None if inputs stay in 16 bits."""

    @property
    def label(self) -> str:
        """Such as `W4A16 g128`, `FP8 per channel` or `Q4_K`."""
        static = self.inputs is not None and self.inputs.dynamic is False
        return self.weights.kind or numbers.label(
            self.weights, self.inputs, self.weights.symmetric, static
        )

    @property
    def runs_as(self) -> str | None:
        """One of `hardware.support.FORMATS`; None if it has no row there."""
        if kind := self.weights.kind:
            return None if kind.startswith(BITSANDBYTES) else "gguf"
        return runs_as(numbers.of(self.weights).tag, self.weights, self.inputs)


@dataclass(frozen=True)
class Declared:
    """A parsed `quantization_config`."""

    method: str
    parts: tuple[Part, ...]
    ignore: tuple[str, ...] = ()
    maker: str | None = None
    """The maker, if the config names it."""
    kv_cache: bool = False
    """Whether keys and values are stored in FP8, with scales in the files."""

    def part(self, module: str) -> Part | None:
        """What is declared for a layer, names before patterns before classes; None: nothing."""
        ways = (
            lambda target: target == module,
            lambda target: target.startswith("re:") and re.match(target[3:], module) is not None,
            lambda target: target in ("Linear", "FusedMoE"),
        )
        for way in ways:
            for part in self.parts:
                if any(map(way, part.targets)):
                    return part
        return None

    def ignores(self, module: str) -> str | None:
        """The entry that keeps a layer in 16 bits; None if there is none."""
        return next((entry for entry in self.ignore if self.means(entry, module)), None)

    def means(self, entry: str, module: str) -> bool:
        """Whether an entry of `ignore` names a module, by the rules of the method's readers."""
        if entry.startswith("re:"):
            return re.match(entry[3:], module) is not None
        return self.dialect.means(entry, module)

    @property
    def dialect(self) -> "Dialect":
        """How such configs are read."""
        return DIALECTS[self.method]

    @property
    def words(self) -> str:
        """A short summary, such as `gptq: W4A16 g128`."""
        labels = (part.label.removeprefix(f"{self.method} ") for part in self.parts)
        parts = list(dict.fromkeys(labels))
        cache = "; FP8 KV cache" if self.kv_cache else ""
        return f"{self.method}: {'; '.join(parts)}{cache}"


def of(config: Mapping[str, Any], where: str, card: str = "") -> Declared:
    """What a config declares; `where` is for messages, `card` is the text of the model card."""
    found = section(config)
    method = str(found.get("quant_method") or ("modelopt" if found.get("quant_algo") else ""))
    if method not in DIALECTS:
        raise CheckpointError(
            f"{where} is quantised by {method or 'a method without a name'}, which quantkit does "
            f"not read; supported: {', '.join(DIALECTS)}"
        )
    try:
        parts, ignore = DIALECTS[method].read(found)
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise CheckpointError(
            f"{where} has a quantization_config that quantkit cannot read "
            f"({method}: {_reason(error)})"
        ) from error
    maker = _maker(found) or _maker_of_card(card)
    return Declared(method, parts, ignore, maker, bool(found.get("kv_cache_scheme")))


def section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`quantization_config` itself, which may be in the language model's part."""
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        if isinstance(found := part.get("quantization_config"), dict):
            return found
    return {}


def packs_rows(found: Mapping[str, Any]) -> bool:
    """Whether words of `qweight` hold rows, as AutoAWQ's do; otherwise columns, as AutoGPTQ's."""
    # AutoRound writes both layouts, and declares which.
    return "awq" in str(found.get("packing_format") or found.get("quant_method") or "")


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


Read = tuple[tuple[Part, ...], tuple[str, ...]]


def _compressed_tensors(found: Mapping[str, Any]) -> Read:
    parts = []
    for name, group in found["config_groups"].items():
        if not isinstance(group, dict):
            raise ValueError(f"group {name} is incomplete")
        if (weights := group.get("weights")) is None:
            continue
        made = Weights(
            int(weights["num_bits"]),
            str(weights.get("type", "int")),
            str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")),
            _size(weights.get("group_size")),
            bool(weights.get("symmetric", True)),
        )
        inputs = group.get("input_activations")
        scheme = None if inputs is None else _inputs(inputs)
        parts.append(Part(tuple(group["targets"]), made, scheme))
    return tuple(parts), tuple(found.get("ignore") or ())


def _inputs(given: Mapping[str, Any]) -> ActivationScheme:
    """Per-tensor scales measured at run time count as per-token ones."""
    if given.get("symmetric") is False:
        raise ValueError("input_activations with zero points are not supported")
    dynamic, strategy = given.get("dynamic", False), given.get("strategy") or "tensor"
    if strategy == "tensor" and dynamic is True:
        strategy = "token"
    size = _size(given.get("group_size")) if strategy in ("group", "tensor_group") else None
    return ActivationScheme.model_validate(
        {
            "num_bits": given.get("num_bits", 8),
            "type": given.get("type", "int"),
            "strategy": strategy,
            "group_size": size,
            "dynamic": dynamic,
        }
    )


def _size(given: Any) -> int | None:
    return None if given in (None, -1, 0) else int(given)


def _integers(bits: Any, size: Any, symmetric: bool) -> Weights:
    size = _size(size)
    return Weights(int(bits), "int", "group" if size else "channel", size, symmetric)


def _gptq(found: Mapping[str, Any]) -> Read:
    own = Part(EVERY, _integers(found["bits"], found.get("group_size"), found.get("sym", True)))
    parts, ignore = [], [*(found.get("modules_to_not_convert") or ())]
    for pattern, change in (found.get("dynamic") or {}).items():
        if pattern.startswith("-:"):
            ignore.append(f"re:.*{pattern[2:]}")
        else:
            merged = {**found, **change}
            weights = _integers(merged["bits"], merged.get("group_size"), merged.get("sym", True))
            parts.append(Part((f"re:.*{pattern.removeprefix('+:')}",), weights))
    return (*parts, own), tuple(ignore)


def _awq(found: Mapping[str, Any]) -> Read:
    version = str(found.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"version {version}: only gemm is supported")
    bits = found["bits"] if "bits" in found else found["w_bit"]
    size = found["group_size"] if "group_size" in found else found.get("q_group_size")
    weights = _integers(bits, size, not found.get("zero_point", True))
    return (Part(EVERY, weights),), tuple(found.get("modules_to_not_convert") or ())


def _auto_round(found: Mapping[str, Any]) -> Read:
    if str(found.get("data_type", "int")) != "int":
        raise ValueError(f"data_type {found['data_type']}: only int is supported")
    if _size(found.get("act_bits", 16)) not in (None, 16):
        raise ValueError(f"act_bits {found['act_bits']}: only 16 is supported")
    own = _integers(found["bits"], found.get("group_size"), found.get("sym", True))
    parts, ignore = [], []
    for name, change in (found.get("extra_config") or {}).items():
        if int(change.get("bits", own.num_bits)) >= 16:
            ignore.append(name)
        else:
            merged = {**found, **change}
            weights = _integers(merged["bits"], merged.get("group_size"), merged.get("sym", True))
            parts.append(Part((name,), weights))
    return (*parts, Part(EVERY, own)), tuple(ignore)


def _fp8(found: Mapping[str, Any]) -> Read:
    blocks = found.get("weight_block_size")
    scheme = FP8_GROUPS if blocks else FP8_TOKEN
    if found.get("activation_scheme", "dynamic") == "static":
        scheme = FP8_TENSOR
    weights = Weights(8, "float", "block" if blocks else "tensor")
    names = found.get("ignored_layers") or found.get("modules_to_not_convert") or ()
    return (Part(EVERY, weights, ActivationScheme.model_validate(scheme)),), tuple(names)


def _fbgemm(found: Mapping[str, Any]) -> Read:
    weights = Weights(8, "float", "channel")
    names = tuple(found.get("modules_to_not_convert") or ())
    return (Part(EVERY, weights, ActivationScheme.model_validate(FP8_TOKEN)),), names


def _modelopt(found: Mapping[str, Any]) -> Read:
    inner = found.get("quantization")
    found = inner if isinstance(inner, dict) else found
    algorithm = str(found["quant_algo"]).upper()
    if algorithm not in MODELOPT:
        raise ValueError(f"quant_algo {algorithm}: supported are {', '.join(MODELOPT)}")
    weights, inputs = MODELOPT[algorithm]
    scheme = None if inputs is None else ActivationScheme.model_validate(inputs)
    names = found.get("ignore") or found.get("exclude_modules") or ()
    return (Part(EVERY, Weights(*weights), scheme),), tuple(names)


def _mxfp4(found: Mapping[str, Any]) -> Read:
    names = tuple(found.get("modules_to_not_convert") or ())
    return (Part(("re:.*experts.*",), Weights(4, "float", "group", 32)),), names


def _bitsandbytes(found: Mapping[str, Any]) -> Read:
    """Blocks of 64 unless the files say otherwise; LLM.int8() splits its inputs at run time."""
    names = tuple(found.get("llm_int8_skip_modules") or ())
    if found.get("load_in_8bit"):
        return (Part(EVERY, Weights(8, "int", "channel", kind=f"{BITSANDBYTES} INT8")),), names
    if not found.get("load_in_4bit", True):
        raise ValueError("neither load_in_4bit nor load_in_8bit is set")
    kind = str(found.get("bnb_4bit_quant_type", "fp4"))
    if kind not in ("nf4", "fp4"):
        raise ValueError(f"bnb_4bit_quant_type {kind}: nf4 and fp4 are supported")
    return (
        Part(EVERY, Weights(4, "float", "group", 64, kind=f"{BITSANDBYTES} {kind.upper()}")),
    ), names


def _same(entry: str, module: str) -> bool:
    return entry == module


def _within(entry: str, module: str) -> bool:
    """A whole part of the name, at any position."""
    return f".{entry}." in f".{module}."


def _globbed(entry: str, module: str) -> bool:
    return fnmatch.fnmatchcase(module, entry) or module.startswith(f"{entry}.")


@dataclass(frozen=True)
class Dialect:
    """Conventions of the tools that write a method's configs and the engines that read them."""

    read: Callable[[Mapping[str, Any]], Read]
    means: Callable[[str, str], bool] = _within
    """Whether an `ignore` entry names a module."""
    by_config: bool = False
    """Whether engines go by the config alone; others look at which tensors exist."""
    spells_out: bool = False
    """Whether every quantised layer is listed in the config with its numbers."""
    joins_experts: bool = False
    """Whether all experts of a block are one tensor."""
    ignore_keys: tuple[str, ...] = ()
    """Where `convert --repair` lists unquantised layers, the usual key first; empty: nowhere."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a missing key means to the tools that wrote such files."""


DIALECTS = {
    "compressed-tensors": Dialect(
        _compressed_tensors, _same, by_config=True, spells_out=True, ignore_keys=("ignore",)
    ),
    "gptq": Dialect(_gptq, defaults={"desc_act": False}),
    "awq": Dialect(
        _awq,
        ignore_keys=("modules_to_not_convert",),
        defaults={"zero_point": True},
    ),
    "auto-round": Dialect(_auto_round),
    "fp8": Dialect(_fp8, by_config=True, ignore_keys=("ignored_layers", "modules_to_not_convert")),
    "fbgemm_fp8": Dialect(_fbgemm, by_config=True),
    "modelopt": Dialect(_modelopt, _globbed, by_config=True),
    "mxfp4": Dialect(_mxfp4, joins_experts=True),
    "bitsandbytes": Dialect(_bitsandbytes),
}


def _maker(found: Mapping[str, Any]) -> str | None:
    """The quantiser and its version, if the config has them."""
    meta = found.get("meta")
    quantizer = meta.get("quantizer") if isinstance(meta, dict) else None
    if quantizer:
        name = str(quantizer[0] if isinstance(quantizer, list) else quantizer)
        return _known(name.partition(":")[0], name.partition(":")[2])
    producer = found.get("producer")
    if isinstance(producer, dict) and producer.get("name"):
        return _known(str(producer["name"]), str(producer.get("version") or ""))
    if version := found.get("autoround_version"):
        return f"AutoRound {version}"
    if found.get("quant_method") == "bitsandbytes":
        return "bitsandbytes"
    if found.get("quant_method") == "compressed-tensors" and (version := found.get("version")):
        return f"compressed-tensors {version}"
    return None


def _known(name: str, version: str) -> str:
    names = (maker for maker, words in MAKERS.items() if name.lower() in words)
    return f"{next(names, name)} {version}".strip()


def _maker_of_card(card: str) -> str | None:
    low = card.lower()
    found = [maker for maker, words in MAKERS.items() if any(word in low for word in words)]
    return f"{found[0]}, by its model card" if len(found) == 1 else None
