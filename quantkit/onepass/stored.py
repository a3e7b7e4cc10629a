"""What a recipe has written for a block, read back."""

import torch

from quantkit import formats, grid
from quantkit.export.folder import FolderWriter
from quantkit.model.blocks import Decoder
from quantkit.plan.checkpoint import Plan

Block = tuple[dict[str, torch.Tensor], dict[str, grid.QuantizedWeight]]
"""Parameters that are unchanged or had scales folded in, and quantised linears, by name."""


def read_block(decoder: Decoder, index: int, plan: Plan, writer: FolderWriter) -> Block:
    """A block's parameters on the device, the quantised ones as stored numbers."""
    device = decoder.device
    plain: dict[str, torch.Tensor] = {}
    linears: dict[str, grid.QuantizedWeight] = {}
    for name, source in decoder.tensors(index).items():
        stored = decoder.stored(index, name)
        module = (stored or "").removesuffix(".weight")
        if stored is None:  # built from several tensors, none of them changed
            plain[name] = source.read().to(device)
        elif module not in plan.quantized or not name.endswith(".weight"):
            plain[name] = writer.stored(stored).read().to(device)
        else:
            specs = formats.specs(module, plan.quantized[module], plan.recipe)
            parts = {s.name: writer.stored(s.name).read().to(device) for s in specs}
            quantized = formats.unpack(module, parts, plan.recipe)
            linears[name.removesuffix(".weight")] = quantized
    return plain, linears


def dequantized(decoder: Decoder, index: int, plan: Plan, block: Block) -> dict[str, torch.Tensor]:
    """The parameters that a block computes with."""
    plain, linears = block
    return plain | {
        f"{name}.weight": grid.dequantize(
            made, plan.recipe.part(decoder.module(index, name)).weights
        )
        for name, made in linears.items()
    }
