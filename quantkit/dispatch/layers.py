"""The layers of a checkpoint as an engine sees them: from the names and shapes in its headers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantkit import families
from quantkit.formats import declared
from quantkit.tensorspec import TensorSpec

PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_shape",
    "weight_global_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale",
    "qweight", "qzeros", "scales", "g_idx", "SCB", "bias",
)  # fmt: skip
NARROW = ("F8_E4M3", "F8_E5M2", "I8", "U8")
PLAIN = ("BF16", "F16", "F32")
EXPERT = re.compile(r"^(?P<block>.*\.experts)\.(?P<index>\d+)\.(?P<layer>\w+)$")
TOGETHER = re.compile(r"^.*\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)$")
"""Layers of all experts of a block in one tensor."""
BLOCK = re.compile(r"^(?P<before>.*?\blayers)\.(?P<index>\d+)\.")
UNQUANTIZED = (
    "embed_tokens", "embed_tokens_per_layer", "embed_in", "wte", "wpe", "embeddings",
    "word_embeddings", "gate", "router", "shared_expert_gate", "lm_head", "conv1d", "patch_embed",
    "position_embedding", "weights_proj",
)  # fmt: skip
"""Modules with a matrix that vLLM builds without a quantised method unless they are named."""
VISION = re.compile(r"\b(visual|vision_tower|vision_model|vision_encoder|audio_tower|mtp)\b")
FUSED_NAMES = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("q_a_proj", "kv_a_proj_with_mqa"): "fused_qkv_a_proj",
}
PREFIXES: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"),
        (("model.language_model.", "language_model.model."), ("model.visual.", "visual."),
         ("lm_head", "language_model.lm_head"), ("model.", "language_model.model.")),
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"),
        (("model.visual.", "visual."), ("lm_head", "language_model.lm_head"),
         ("model.language_model.", "language_model.model.")),
    ),
    **dict.fromkeys(
        ("gemma3", "llava", "llava_onevision", "paligemma", "mistral3"),
        (("model.language_model.", "language_model.model."),
         ("model.vision_tower.", "vision_tower."),
         ("model.multi_modal_projector.", "multi_modal_projector."),
         ("lm_head", "language_model.lm_head")),
    ),
}  # fmt: skip
"""`hf_to_vllm_mapper` of vLLM's models (vllm/model_executor/models), by model type."""


@dataclass(frozen=True)
class Layer:
    """A linear layer, or one of an expert, under its name in the files."""

    name: str
    parts: Mapping[str, TensorSpec]

    @cached_property
    def is_quantized(self) -> bool:
        """Whether it is stored in anything but 16-bit numbers."""
        if "weight_packed" in self.parts or "qweight" in self.parts:
            return True
        weight = self.parts.get("weight")
        return weight is not None and weight.dtype in NARROW

    @cached_property
    def is_packed(self) -> bool:
        """Whether its weight has another name than a 16-bit one has."""
        return "weight_packed" in self.parts or "qweight" in self.parts

    @cached_property
    def is_flat(self) -> bool:
        """Whether its weight is one long column, as bitsandbytes stores 4 bits."""
        weight = self.parts.get("weight")
        return weight is not None and weight.dtype == "U8" and weight.shape[1:] == (1,)

    def shape(self, bits: int, awq: bool = False) -> tuple[int, int]:
        """Rows and columns, as far as packed words show them; `bits` of the stored integers."""
        if (words := self.parts.get("qweight")) is not None and len(words.shape) == 2:
            first, second = words.shape
            return (second * 32 // bits, first) if awq else (second, first * 32 // bits)
        if (words := self.parts.get("weight_packed")) is not None and len(words.shape) == 2:
            rows, width = words.shape
            if words.dtype != "I32":
                return rows, width * 2
            return rows, width * 32 // bits
        weight = self.parts.get("weight")
        if weight is None or len(weight.shape) != 2 or self.is_flat:
            return 0, 0
        return weight.shape[0], weight.shape[1] * (2 if weight.dtype == "U8" else 1)


@dataclass(frozen=True)
class Checkpoint:
    """A config and the headers of its files."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSpec]
    label: str = "the checkpoint"
    section: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config`, or the file that takes its place."""

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        for key in ("text_config", "llm_config", "language_config"):
            if isinstance(part := self.config.get(key), dict):
                return part
        return self.config

    @cached_property
    def method(self) -> str:
        found = self.section.get("quant_method")
        if not found and ("quant_algo" in self.section or "quantization" in self.section):
            found = "modelopt"
        return str(found or "")

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Every module that has a matrix and could be a linear layer, in the files' order."""
        parts: dict[str, dict[str, TensorSpec]] = {}
        for name, spec in self.tensors.items():
            module, _, last = name.rpartition(".")
            if last in PARTS:
                parts.setdefault(module, {})[last] = spec
        result = {}
        for name, found in parts.items():
            layer = Layer(name, found)
            weight = found.get("weight")
            if layer.is_quantized or (weight is not None and len(weight.shape) == 2):
                result[name] = layer
        return result

    @cached_property
    def linears(self) -> dict[str, Layer]:
        """Those that vLLM builds with a quantised method if its config declares them."""
        return {
            name: layer
            for name, layer in self.layers.items()
            if layer.is_quantized or name.rpartition(".")[2] not in UNQUANTIZED
        }

    @cached_property
    def fused(self) -> list[tuple[str, list[str]]]:
        """Layers that vLLM fuses: its own name, and theirs."""
        result: dict[str, list[str]] = {}
        names = dict(FUSED_NAMES)
        for shards in families.fused():
            names.setdefault(tuple(shards), "gate_up_proj")
        by_shard = {shard: (shards, name) for shards, name in names.items() for shard in shards}
        for module in self.linears:
            parent, _, last = module.rpartition(".")
            if last not in by_shard or EXPERT.match(module):
                continue
            shards, name = by_shard[last]
            present = [one for shard in shards if (one := f"{parent}.{shard}") in self.linears]
            if len(present) > 1:
                result.setdefault(f"{parent}.{name}", present)
        return list(result.items())

    @cached_property
    def experts(self) -> dict[str, dict[int, dict[str, Layer]]]:
        """Layers of experts by block, index and name."""
        result: dict[str, dict[int, dict[str, Layer]]] = {}
        for name, layer in self.linears.items():
            if match := EXPERT.match(name):
                block = result.setdefault(match["block"], {})
                block.setdefault(int(match["index"]), {})[match["layer"]] = layer
        return result

    def inside(self, name: str) -> str:
        """A module's name inside vLLM."""
        for before, after in PREFIXES.get(str(self.config.get("model_type")), ()):
            if name.startswith(before):
                return after + name.removeprefix(before)
        return name


def of(config: Mapping[str, Any], tensors: Mapping[str, TensorSpec], label: str,
       beside: Mapping[str, Any] | None = None) -> Checkpoint:  # fmt: skip
    """A checkpoint from its config and tensors; `beside` is a quantiser's own file, if any."""
    return Checkpoint(config, tensors, label, declared.section(config) or dict(beside or {}))
