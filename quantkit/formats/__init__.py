"""The file formats of checkpoints for vLLM: one module each, and the table of them.

A format declares which schemes it holds, which tensors it stores and what the config says, and
packs a layer's numbers into those tensors and back. All other code goes through this module, by
recipe. Only `pack` and `unpack` load torch.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from quantkit.tensorspec import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from quantkit.formats.contract import Format, Schemes
    from quantkit.grid import QuantizedWeight

COMPRESSED_TENSORS = "compressed-tensors"
MODULES = {
    COMPRESSED_TENSORS: "quantkit.formats.compressed_tensors",
    "gptq": "quantkit.formats.gptq",
    "awq": "quantkit.formats.awq",
    "fp8": "quantkit.formats.fp8",
    "modelopt": "quantkit.formats.modelopt",
}
FORMATS = tuple(MODULES)
PLAIN = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
"""Dtypes of unquantised folders, by their names in `convert --to`."""
NEED_MORE = ("gptq", "awq")
"""Formats that plain transformers does not load by itself."""


@cache
def find(name: str) -> Format:
    """A format by name; one of FORMATS."""
    return cast("Format", import_module(MODULES[name]))


def of(recipe: Schemes) -> Format:
    """The format that a recipe is written in."""
    return find(recipe.format)


def specs(module: str, weight: TensorSpec, recipe: Schemes) -> list[TensorSpec]:
    """The tensors of one layer's weight in the recipe's format."""
    return of(recipe).specs(module, weight, recipe.part(module))


def pack(
    module: str,
    weight: QuantizedWeight,
    recipe: Schemes,
    input_scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """One layer's quantised weight as the tensors of `specs`."""
    return of(recipe).pack(module, weight, recipe.part(module), input_scale)


def unpack(module: str, stored: Mapping[str, torch.Tensor], recipe: Schemes) -> QuantizedWeight:
    """The inverse of `pack`."""
    return of(recipe).unpack(module, stored, recipe.part(module))


def input_scale(
    module: str, stored: Mapping[str, torch.Tensor], recipe: Schemes
) -> torch.Tensor | None:
    """The fixed scale of a layer's inputs; None if there is none."""
    return of(recipe).input_scale(module, stored)


def config(recipe: Schemes, ignore: list[str]) -> dict[str, Any]:
    """The section of `config.json` for serving engines. `ignore` lists every unquantised Linear."""
    return of(recipe).config(recipe, ignore)


def scale_dtype(recipe: Schemes) -> torch.dtype | None:
    """The dtype that scales are stored in, if they may not fit into it; otherwise None."""
    import torch

    name = of(recipe).SCALE_TYPE
    return None if name is None else getattr(torch, name)


def kv_specs(attention: str, dtype: str, n_heads: int | None = None) -> list[TensorSpec]:
    """The scales of one attention module's keys and values, or of those of each head."""
    shape = (1,) if n_heads is None else (n_heads, 1, 1)
    return [TensorSpec(f"{attention}.{kind}_scale", dtype, shape) for kind in ("k", "v")]
