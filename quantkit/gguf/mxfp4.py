"""llama.cpp's MXFP4, the type of gpt-oss's experts: 4-bit floats, a power of two per 32 as scale.

Equal to ggml's. Weights that had this type before are stored without loss: a block's largest number
decides its scale, and all others are on the same grid or on one twice as fine.
"""

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType

from quantkit.gguf import search
from quantkit.gguf.values import FP4

BLOCK = 32
HIGHEST = 2
"""Power of two of the largest number."""
BIAS = 127


def mxfp4(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """The nearest number, the smaller one on ties; nothing is searched, so importance is unused."""
    blocks = search.planes(x, BLOCK)
    peak = blocks.abs().amax(0, keepdim=True)
    power = (torch.frexp(peak).exponent - 1 - HIGHEST).clamp(-BIAS, BIAS)
    stored = torch.where(peak > 0, power + BIAS, 0)
    scaled = torch.ldexp(blocks, BIAS - stored)
    sizes = torch.tensor(FP4[:8], device=x.device)
    limits = (sizes[1:] + sizes[:-1]) / 2
    levels = torch.bucketize(scaled.abs(), limits)
    levels += 8 * ((scaled < 0) & (levels > 0))
    return search.join(stored.to(torch.uint8), search.pack(levels.to(torch.uint8), 4))


KINDS: dict[GGMLQuantizationType, Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]] = {
    GGMLQuantizationType.MXFP4: mxfp4,
}
