"""The interface of a format module, and what it needs to know about a recipe."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme
from quantkit.tensorspec import TensorSpec

if TYPE_CHECKING:
    import torch

    from quantkit.grid import QuantizedWeight


class Schemes(Protocol):
    """The number formats of a recipe, and the file format they go into."""

    @property
    def format(self) -> str: ...
    @property
    def weights(self) -> WeightScheme: ...
    @property
    def input_activations(self) -> ActivationScheme | None: ...
    @property
    def kv_cache(self) -> KVCacheScheme | None: ...
    @property
    def has_static_inputs(self) -> bool: ...
    @property
    def parts(self) -> "Sequence[Schemes]":
        """One for each combination of number formats."""

    @property
    def group_targets(self) -> "Sequence[list[str]]":
        """The layers that parts after the first apply to."""

    def part(self, module: str) -> "Schemes":
        """What applies to one layer."""


class Format(Protocol):
    """The interface of a format module."""

    NAME: str
    SCALE_TYPE: str | None
    """The dtype that scales are stored in, if they may not fit into it; otherwise None."""

    def objection(
        self,
        weights: WeightScheme,
        activations: ActivationScheme | None,
        kv_cache: KVCacheScheme | None,
    ) -> str | None:
        """Why these numbers cannot be written, and what can hold them; None if they can."""

    def misfit(self, rows: int, columns: int, recipe: Schemes) -> str | None:
        """Why a layer of this shape cannot be written; None if it can."""

    def specs(self, module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
        """The tensors of one layer's weight: exactly these, in this order."""

    def pack(
        self,
        module: str,
        weight: "QuantizedWeight",
        recipe: Schemes,
        input_scale: "torch.Tensor | None",
    ) -> dict[str, "torch.Tensor"]:
        """One layer's quantised weight in the form of `specs`."""

    def unpack(
        self, module: str, stored: Mapping[str, "torch.Tensor"], recipe: Schemes
    ) -> "QuantizedWeight":
        """The inverse of `pack`."""

    def input_scale(
        self, module: str, stored: Mapping[str, "torch.Tensor"]
    ) -> "torch.Tensor | None":
        """The fixed scale of a layer's inputs [1]; None if there is none."""

    def config(self, recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
        """The section of `config.json` for engines. `ignore` lists every unquantised Linear."""


def any_shape(rows: int, columns: int, recipe: Schemes) -> str | None:
    """The `misfit` of a format that supports layers of every shape."""
    return None


def wide_inputs(module: str, stored: Mapping[str, "torch.Tensor"]) -> "torch.Tensor | None":
    """The `input_scale` of a format that leaves activations in 16 bits."""
    return None
