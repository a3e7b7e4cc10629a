"""llama.cpp's NVFP4 (type 40): a checkpoint's codes and scales, repacked.

A block holds 64 weights: four unsigned E4M3 scales, then 32 bytes of codes; of each 16 codes the
first eight are in the low nibbles. The global scale is a tensor of its own, `blk.0.attn_q.scale`,
by which llama.cpp multiplies the layer's output; `.input_scale` is that of the inputs.
"""

import torch

from quantkit.gguf.tensors import NVFP4_BLOCK
from quantkit.numbers.nvfp4 import SIZE

SCALES = SCALE, INPUT_SCALE = "scale", "input_scale"
"""Suffixes that replace `weight` in a tensor's name."""


def pack(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [rows, columns] and E4M3 scale bytes [rows, columns / 16] as rows of bytes."""
    rows, columns = codes.shape
    groups = codes.reshape(rows, columns // SIZE, 2, SIZE // 2)
    halves = (groups[:, :, 0] | (groups[:, :, 1] << 4)).view(rows, columns // NVFP4_BLOCK, -1)
    scales = scale.reshape(rows, columns // NVFP4_BLOCK, -1)
    return torch.cat((scales, halves), -1).view(rows, -1)


def scale_name(name: str, what: str) -> str:
    """The name of a tensor's scale."""
    return f"{name.removesuffix('weight')}{what}"
