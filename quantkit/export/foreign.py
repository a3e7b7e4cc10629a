"""A quantised checkpoint made by another tool.

Its weights are dequantised when read, so it is a source like any other; in addition it knows what
its config declares. It has no manifest: neither the recipe nor the original model is on record. The
caller names the original, and what can be checked is checked: architecture and vocabulary.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, ScoreError
from quantkit.formats import declared
from quantkit.formats.declared import Declared, Part
from quantkit.model import dequantized
from quantkit.model.derived import DerivedTensor
from quantkit.model.description import README
from quantkit.model.source import ModelSource, read_config, text_config
from quantkit.model.tokenizer import load as load_tokenizer

if TYPE_CHECKING:
    import torch

    from quantkit.schemes import ActivationScheme

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
INPUT_SCALES = ("input_scale", "input_global_scale")
OF_CACHE = {"k": ("k_scale", "k_proj.k_scale"), "v": ("v_scale", "v_proj.v_scale")}
"""Where files keep the scales of keys and values, relative to the attention module."""


@dataclass(frozen=True)
class ForeignCheckpoint(ModelSource):
    """Its files, dequantised when read."""

    original: ModelSource | None = None
    """The model it is compared with, if known."""

    @classmethod
    def of(cls, model: ModelSource) -> "ForeignCheckpoint":
        """The same model with what its config declares; refused if the declaration is not
        supported.
        """
        own = {field.name: getattr(model, field.name) for field in fields(ModelSource)}
        made = cls(**own)
        assert made.declared
        return made

    @cached_property
    def declared(self) -> Declared:
        """What its config declares about its layers."""
        card = self.folder / README
        text = card.read_text("utf-8", "replace") if card.is_file() else ""
        return declared.of(self.raw_config, str(self.folder), text)

    @cached_property
    def raw_config(self) -> Mapping[str, Any]:
        """The whole config, unchanged."""
        return read_config(self.folder)

    @cached_property
    def config_digest(self) -> str:
        """A hash of what its config declares."""
        text = json.dumps(declared.section(self.raw_config), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def layers(self) -> list[str]:
        """Every module whose files hold anything but 16-bit numbers."""
        return dequantized.modules(self.stored)

    def read(self, name: str) -> "torch.Tensor":
        """A parameter; dequantised ones in float32, in which engines' kernels compute scales."""
        tensor = self.tensors[name]
        wide = replace(tensor, dtype="F32") if isinstance(tensor, DerivedTensor) else tensor
        return wide.read()

    def part(self, module: str) -> Part:
        """What is declared for a quantised layer."""
        found = self.declared.part(module)
        if found is None:
            raise CheckpointError(
                f"{self.folder}: {module} is stored quantised, but no group of quantization_config "
                "covers it; run `quantkit verify`"
            )
        return found

    def input_scale(self, module: str, scheme: "ActivationScheme") -> "torch.Tensor | None":
        """The fixed scale of a layer's inputs; None if all are measured at run time."""
        if not scheme.is_static:
            return None
        kind = next((k for k in INPUT_SCALES if f"{module}.{k}" in self.stored), None)
        if kind is None:
            raise CheckpointError(
                f"{self.folder} lacks {module}.input_scale, which its config declares; run "
                "`quantkit verify`"
            )
        scale = self.stored[f"{module}.{kind}"].read().float()
        # ModelOpt stores multipliers, compressed-tensors divisors.
        inverse = scheme.strategy == "tensor_group" and kind == "input_scale"
        return scale.reciprocal() if inverse else scale

    def cache_scale(self, attention: str, kind: str) -> "torch.Tensor | None":
        """The scale of keys (`k`) or values (`v`); None if the files have none."""
        names = (f"{attention}.{last}" for last in OF_CACHE[kind])
        found = next((name for name in names if name in self.stored), None)
        return None if found is None else self.stored[found].read().float().reshape(1)

    def compared_with(self, original: ModelSource) -> "ForeignCheckpoint":
        """The same, to be compared with a model of the same architecture and vocabulary."""
        ours, theirs = likeness(self), likeness(original)
        if ours != theirs:
            raise CheckpointError(
                f"{self.label} was not made from {original.label}: it is {ours}, and "
                f"{original.label} is {theirs}; give the model that it was made from"
            )
        return replace(self, original=original)


def no_source(found: str) -> ScoreError:
    """The error for a comparison without a source, or with more than one."""
    return ScoreError(
        f"a comparison needs one source model, found: {found}; name the 16-bit model that the "
        "checkpoints were made from, and no other"
    )


def is_source(target: object) -> bool:
    """Whether a scored model is a source, not a checkpoint of one."""
    return isinstance(target, ModelSource) and not isinstance(target, ForeignCheckpoint)


def likeness(model: ModelSource) -> str:
    """What a checkpoint shares with the model it was made from, in words."""
    config = read_config(model.folder)
    text = text_config(config)
    named = config.get("architectures") or [config.get("model_type")]
    sizes = ", ".join(f"{key} {text[key]}" for key in SIZES if key in text)
    return f"{named[0]} ({sizes}; tokens {_vocabulary(model.folder, model.trust_remote_code)})"


def _vocabulary(folder: Path, trust_remote_code: bool) -> str:
    """A hash of all tokens and their ids."""
    tokens = sorted(load_tokenizer(folder, trust_remote_code).get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12]
