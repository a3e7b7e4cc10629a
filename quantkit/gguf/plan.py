"""The contents of a GGUF file, planned before any weight is read."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from gguf import GGMLQuantizationType, Keys

from quantkit.gguf import mixture
from quantkit.gguf.mixture import UNQUANTISED, Choice
from quantkit.gguf.tensors import GGUFTensor, size_bytes
from quantkit.recipe import GGUFRecipe

if TYPE_CHECKING:
    import torch

NAME = "gguf"
"""The format's name in manifests."""


class AnyLayout(Protocol):
    """The tensors of a planned file, from a Hugging Face model or from another GGUF file."""

    @property
    def architecture(self) -> str: ...
    @property
    def tensors(self) -> list[GGUFTensor]: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    def build(self, name: str, device: "torch.device | None" = None) -> "torch.Tensor": ...


@dataclass(frozen=True)
class GGUFPlan:
    """One planned file: its recipe, and the type of every tensor."""

    recipe: GGUFRecipe
    layout: AnyLayout
    kinds: dict[str, GGMLQuantizationType]
    """By the tensor's name in the file, in file order."""
    notes: list[str] = field(default_factory=list)
    scale_bytes: int = 0
    """Scales stored as tensors of their own, as NVFP4 has them."""

    @property
    def asked_digest(self) -> str:
        return self.recipe.digest

    @property
    def quantized(self) -> dict[str, GGUFTensor]:
        """Tensors that are stored in blocks, by the source's name for the layer."""
        return {
            layer_of(tensor): tensor
            for tensor in self.layout.tensors
            if self.kinds[tensor.name] not in UNQUANTISED
        }

    @property
    def n_parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.layout.tensors if tensor.parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(self._bytes, self.layout.tensors)) + self.scale_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.size_bytes / self.n_parameters

    @property
    def quantized_bits_per_weight(self) -> float:
        """The same, for tensors stored in blocks only."""
        tensors = list(self.quantized.values()) or self.layout.tensors
        stored = sum(map(self._bytes, tensors)) + self.scale_bytes
        return 8 * stored / sum(prod(t.shape) for t in tensors)

    def _bytes(self, tensor: GGUFTensor) -> int:
        return size_bytes(tensor.shape, self.kinds[tensor.name])


def layer_of(tensor: GGUFTensor) -> str:
    """The source's name for the layer that a tensor holds, as in manifests of other formats."""
    if len(tensor.parts) > 1 and tensor.module is not None:  # experts
        return tensor.module
    layer = tensor.parts[0].removesuffix(".weight")
    if tensor.rows is not None:  # one of two
        return f"{layer}.{tensor.name.split('.')[2]}"
    return layer


def make(layout: AnyLayout, recipe: GGUFRecipe, has_importance: bool) -> GGUFPlan:
    """Choose a type for every tensor."""
    choices = mixture.choose(
        recipe.gguf,
        [(tensor.name, tensor.shape) for tensor in layout.tensors],
        {Keys.General.ARCHITECTURE: layout.architecture, **layout.metadata},
        has_importance,
        recipe.tensors,
    )
    return GGUFPlan(
        recipe,
        layout,
        {tensor.name: choices[tensor.name].kind for tensor in layout.tensors},
        _fallbacks(choices),
    )


def _fallbacks(choices: Mapping[str, Choice]) -> list[str]:
    """The tensors that got another type because their rows are not whole blocks, in words."""
    counted = Counter(
        (choice.fallback_from.name, choice.kind.name)
        for choice in choices.values()
        if choice.fallback_from is not None
    )
    if not counted:
        return []
    counts = [f"{n} in {kind} for {wanted}" for (wanted, kind), n in counted.most_common()]
    return [f"rows not divisible into blocks: {' and '.join(counts)}"]
