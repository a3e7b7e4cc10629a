"""FP4 in Triton: rounding that other kernels share, and layer inputs rounded in one read.

The torch twins are `FP4.round`, `NVFP4.rounded` and `MXFP4`'s scales. All arithmetic is float32 as
there; E4M3 is computed from a float's bits, since not every GPU can convert to it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

GROUPS = 64


@triton.jit
def nearest_e4m3(value):  # type: ignore[no-untyped-def]
    """The nearest E4M3 number, ties to even, for an input from 0 to 448."""
    bits = value.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = libdevice.rint(value * 512.0) * 0.001953125
    return tl.where(value < 0.015625, small, kept.to(tl.float32, bitcast=True))


@triton.jit
def e4m3_of(code):  # type: ignore[no-untyped-def]
    """The positive number that an E4M3 code stands for."""
    normal = ((code >> 3) + 120 << 23) | ((code & 7) << 20)
    small = code.to(tl.float32) * 0.001953125
    return tl.where(code < 8, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def power_of(code):  # type: ignore[no-untyped-def]
    """The power of two that an MX scale stands for; code 0 is subnormal in float32."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest_fp4(scaled):  # type: ignore[no-untyped-def]
    """The nearest FP4 number, ties to the even code."""
    size = tl.minimum(tl.abs(scaled), 6.0)
    # Steps of 0.5 up to 2, of 1 up to 4, of 2 beyond: the smallest is the right code.
    code = tl.minimum(libdevice.rint(2.0 * size), libdevice.rint(size) + 2.0)
    code = tl.minimum(code, libdevice.rint(0.5 * size) + 4.0)
    value = tl.maximum(0.5 * code, tl.maximum(code - 2.0, 2.0 * code - 8.0))
    return tl.where(scaled < 0.0, -value, value)


@triton.jit
def fp4_code(value, is_negative):  # type: ignore[no-untyped-def]
    """The code of an FP4 number, as a float; the sign is separate, since zero has one too."""
    size = tl.abs(value)
    code = tl.minimum(2.0 * size, tl.minimum(size + 2.0, 0.5 * size + 4.0))
    return tl.where(is_negative, code + 8.0, code)


@triton.jit
def fp4_of(code):  # type: ignore[no-untyped-def]
    """The number that a code stands for; the sign is in bit 3."""
    size = tl.where(code >= 8.0, code - 8.0, code)
    value = tl.maximum(0.5 * size, tl.maximum(size - 2.0, 2.0 * size - 8.0))
    return tl.where(code >= 8.0, -value, value)


@triton.jit  # type: ignore[untyped-decorator]
def _round_inputs(  # type: ignore[no-untyped-def]
    values_ptr, out_ptr, whole_ptr, n_groups,
    IS_MX: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (groups < n_groups)[:, None]
    wide = tl.load(values_ptr + at, inside, 0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    if IS_MX:
        bits = tl.maximum(largest, 1e-12).to(tl.int32, bitcast=True)
        code = tl.minimum(tl.maximum(((bits + 0x200000) >> 23) - 2, 0), 254)
        step = power_of(code)
        scaled = tl.div_rn(wide, tl.broadcast_to(step[:, None], (GROUPS, SIZE)))
    else:
        whole = tl.load(whole_ptr) + tl.zeros_like(largest)
        local = nearest_e4m3(tl.minimum(whole * (largest * 0.16666666666666666), 448.0))
        step = tl.div_rn(local, whole)
        inverse = tl.div_rn(tl.zeros_like(step) + 1.0, step)
        scaled = wide * tl.where(step == 0.0, 0.0, inverse)[:, None]
    rounded = nearest_fp4(scaled) * step[:, None]
    tl.store(out_ptr + at, rounded.to(out_ptr.dtype.element_ty), inside)


def round_inputs(values: torch.Tensor, size: int, whole: torch.Tensor | None) -> torch.Tensor:
    """Round inputs to FP4 in groups of `size`; `whole` is NVFP4's global scale, None for MX."""
    given = values.contiguous()
    out = torch.empty_like(given)
    n_groups = given.numel() // size
    scale = given if whole is None else whole.to(given.device, torch.float32)
    if n_groups:
        _round_inputs[(triton.cdiv(n_groups, GROUPS),)](
            given, out, scale, n_groups, IS_MX=whole is None, GROUPS=GROUPS, SIZE=size, num_warps=4
        )
    return out
