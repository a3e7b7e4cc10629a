"""The search for FP4 scales in one read of the weight; its torch twin is `methods.scales.best`.

A program holds some rows of one tile and tries all scales on them, judged by the tile's own block
of the Gram matrix. Products are bf16 with float32 accumulation, as in the twin on a GPU.
"""

import torch
import triton
import triton.language as tl

from quantkit.methods.kernels.tiles import tile_of
from quantkit.numbers.kernels import e4m3_of, nearest_fp4, power_of

ROWS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    weight_ptr, grams_ptr, scale_ptr, whole_ptr, found_ptr,
    n_rows, n_columns, n_tiles, first, last, lowest, highest,
    IS_MX: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    rows, present, tile, _, weight = tile_of(weight_ptr, n_rows, n_columns, ROWS, SIZE)
    within = tl.arange(0, SIZE)
    at_gram = tile * SIZE * SIZE + within[:, None] * SIZE + within[None, :]
    gram = tl.load(grams_ptr + at_gram).to(tl.bfloat16)
    at_scale = rows.to(tl.int64) * n_tiles + tile
    start = tl.load(scale_ptr + at_scale, present, 1).to(tl.int32)
    least = tl.full((ROWS,), float("inf"), tl.float32)
    best = start
    for step in range(first, last):
        code = tl.minimum(tl.maximum(start + step, lowest), highest)
        if IS_MX:
            scale = power_of(code)
        else:
            scale = tl.div_rn(e4m3_of(code), tl.load(whole_ptr) + tl.zeros_like(least))
        wide = tl.broadcast_to(scale[:, None], (ROWS, SIZE))
        change = nearest_fp4(tl.div_rn(weight, wide)) * wide - weight
        product = tl.dot(change.to(tl.bfloat16), gram, out_dtype=tl.float32)
        error = tl.sum(product * change, 1)
        best = tl.where(error < least, code, best)
        least = tl.minimum(error, least)
    tl.store(found_ptr + at_scale, best.to(tl.uint8), present)


def search(
    weight: torch.Tensor,
    grams: torch.Tensor,
    scale: torch.Tensor,
    whole: torch.Tensor | None,
    steps: range,
    limits: tuple[int, int],
) -> torch.Tensor:
    """For every tile, the best of the scales whose codes are `steps` away from the given code.

    `grams` is [tiles, size, size]; without a global scale the codes are MX's powers of two.
    """
    rows, columns = weight.shape
    tiles, size, _ = grams.shape
    found = torch.empty_like(scale)
    codes = scale.contiguous().view(torch.uint8)
    _search[(triton.cdiv(rows, ROWS), tiles)](
        weight.contiguous(), grams, codes, codes if whole is None else whole,
        found.view(torch.uint8), rows, columns, tiles, steps.start, steps.stop, *limits,
        IS_MX=whole is None, ROWS=ROWS, SIZE=size, num_warps=4,
    )  # fmt: skip
    return found
