"""Dequantise GGUF blocks in torch, so that a GPU can read what it wrote.

Each function takes blocks as bytes [n, bytes per block] and returns float32 [n, weights per block].
The official `gguf` package does the same in numpy; tests compare with it.
"""

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen values of the IQ4 types."""
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""The values of NVFP4's and MXFP4's sixteen codes."""
FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
AT_ONCE = 1 << 22
"""Weights dequantised per call."""
Steps = tuple[torch.Tensor, torch.Tensor]
"""Scales and minima of the groups of a block, [n, groups]: weight = level * scale - minimum."""


def dequantize(data: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Rows of bytes [rows, bytes per row] as float32 [rows, columns]."""
    if kind in FLOATS:
        return data.contiguous().view(FLOATS[kind]).float()
    length, size = GGML_QUANT_SIZES[kind]
    rows = data.shape[0]
    blocks = data.reshape(-1, size)
    parts = [KINDS[kind](part) for part in torch.split(blocks, max(1, AT_ONCE // length))]
    whole: torch.Tensor = torch.cat(parts)
    return whole.view(rows, -1)


def _half(data: torch.Tensor) -> torch.Tensor:
    """Two bytes as one number [n, 1]."""
    return data.contiguous().view(torch.float16).float()


def _shifted(data: torch.Tensor, shifts: list[int], mask: int) -> torch.Tensor:
    """Bit fields of bytes [n, k] as integers [n, shifts, k]."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=data.device)
    return (data[:, None] >> by[:, None]) & mask


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """The low nibbles of all bytes, then the high ones."""
    return _shifted(data, [0, 4], 15).flatten(1).float()


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """One bit for each of 32 weights, as 0 or 16."""
    bits = (data[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1
    return bits.flatten(1).float() * 16


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks[:, :2])


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[:, 2:]) - 8) * _half(blocks[:, :2])


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]) * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 6:]) + _fifth_bits(blocks[:, 2:6])
    return (values - 16) * _half(blocks[:, :2])


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 8:]) + _fifth_bits(blocks[:, 4:8])
    return values * _half(blocks[:, :2]) + _half(blocks[:, 2:4])


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from twelve bytes."""
    first, second, third = torch.split(packed, 4, 1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1)
    mins = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1)
    return scales.float(), mins.float()


def _grouped(values: torch.Tensor, scale: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """values [n, groups * size], with one scale and minimum per group."""
    grouped = values.view(len(values), scale.shape[1], -1)
    return (grouped * scale[:, :, None] - low[:, :, None]).flatten(1)


def _q4_k_steps(blocks: torch.Tensor) -> Steps:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    return scales * _half(blocks[:, :2]), mins * _half(blocks[:, 2:4])


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    # Each 32 bytes hold one group in their low nibbles and the next in their high ones.
    parts = blocks[:, 16:].reshape(-1, 32)
    values = _nibbles(parts).view(len(blocks), 256)
    return _grouped(values, *_q4_k_steps(blocks))


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    values = _nibbles(blocks[:, 48:].reshape(-1, 32)).view(len(blocks), 256)
    values = values + 16 * _shifted(blocks[:, 16:48], list(range(8)), 1).flatten(1)
    return _grouped(values, *_q4_k_steps(blocks))


def _q2_k_steps(blocks: torch.Tensor) -> Steps:
    packed = blocks[:, :16]
    scale = (packed & 15).float() * _half(blocks[:, 80:82])
    return scale, (packed >> 4).float() * _half(blocks[:, 82:84])


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    values = _shifted(blocks[:, 16:80].reshape(-1, 32), [0, 2, 4, 6], 3).float()
    return _grouped(values.reshape(len(blocks), 256), *_q2_k_steps(blocks))


def _q3_k_steps(blocks: torch.Tensor) -> Steps:
    packed = blocks[:, 96:108]
    lower = _shifted(packed[:, :8], [0, 4], 15).flatten(1)
    upper = _shifted(packed[:, 8:], [0, 2, 4, 6], 3).flatten(1)
    scale = ((lower | (upper << 4)).float() - 32) * _half(blocks[:, 108:])
    return scale, torch.zeros_like(scale)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, 32:96].reshape(-1, 32)
    values = _shifted(low, [0, 2, 4, 6], 3).reshape(len(blocks), 256).float()
    values = values - 4 * (1 - _shifted(blocks[:, :32], list(range(8)), 1).flatten(1).float())
    return _grouped(values, *_q3_k_steps(blocks))


def _q6_k_steps(blocks: torch.Tensor) -> Steps:
    scale = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks[:, 208:])
    return scale, torch.zeros_like(scale)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    n = len(blocks)
    lower = _shifted(blocks[:, :128].reshape(-1, 64), [0, 4], 15).reshape(n, 256)
    upper = _shifted(blocks[:, 128:192].reshape(-1, 32), [0, 2, 4, 6], 3).reshape(n, 256)
    values = (lower | (upper << 4)).float() - 32
    return _grouped(values, *_q6_k_steps(blocks))


def _nonlinear(blocks: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(NONLINEAR, dtype=torch.float32, device=blocks.device)
    return table[_nibbles(blocks).long()]


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _nonlinear(blocks[:, 2:]) * _half(blocks[:, :2])


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    lower = _shifted(blocks[:, 4:8, None].flatten(0, 1), [0, 4], 15).reshape(len(blocks), 8)
    upper = _shifted(blocks[:, 2:4, None].flatten(0, 1), [0, 2, 4, 6], 3).reshape(len(blocks), 8)
    scale = ((lower | (upper << 4)).float() - 32) * _half(blocks[:, :2])
    values = _nonlinear(blocks[:, 8:].reshape(-1, 16)).view(len(blocks), 256)
    return _grouped(values, scale, torch.zeros_like(scale))


def nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Without the global scale, which is a tensor of its own."""
    # Scales are unsigned: the official reader ignores bit 7 and reads 0x7F as zero.
    codes = blocks[:, :4].contiguous() & 0x7F
    scale = codes.view(torch.float8_e4m3fn).float().nan_to_num(nan=0.0)
    table = torch.tensor(FP4, dtype=torch.float32, device=blocks.device)
    values = table[_nibbles(blocks[:, 4:].reshape(-1, 8)).long()]
    return (values.view(len(blocks), 4, 16) * scale[:, :, None]).flatten(1)


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(FP4, dtype=torch.float32, device=blocks.device)
    return torch.ldexp(table[_nibbles(blocks[:, 1:]).long()], blocks[:, :1].int() - 127)


KINDS: dict[GGMLQuantizationType, Callable[[torch.Tensor], torch.Tensor]] = {
    GGMLQuantizationType.Q8_0: q8_0,
    GGMLQuantizationType.Q4_0: q4_0,
    GGMLQuantizationType.Q4_1: q4_1,
    GGMLQuantizationType.Q5_0: q5_0,
    GGMLQuantizationType.Q5_1: q5_1,
    GGMLQuantizationType.Q2_K: q2_k,
    GGMLQuantizationType.Q3_K: q3_k,
    GGMLQuantizationType.Q4_K: q4_k,
    GGMLQuantizationType.Q5_K: q5_k,
    GGMLQuantizationType.Q6_K: q6_k,
    GGMLQuantizationType.IQ4_NL: iq4_nl,
    GGMLQuantizationType.IQ4_XS: iq4_xs,
    GGMLQuantizationType.NVFP4: nvfp4,
    GGMLQuantizationType.MXFP4: mxfp4,
}

STEPS: dict[GGMLQuantizationType, Callable[[torch.Tensor], Steps]] = {
    GGMLQuantizationType.Q2_K: _q2_k_steps,
    GGMLQuantizationType.Q3_K: _q3_k_steps,
    GGMLQuantizationType.Q4_K: _q4_k_steps,
    GGMLQuantizationType.Q5_K: _q4_k_steps,
    GGMLQuantizationType.Q6_K: _q6_k_steps,
}


def steps(data: torch.Tensor, kind: GGMLQuantizationType) -> Steps:
    """Scales and minima of K-quants, float32 [rows, groups], from bytes [rows, bytes of a row]."""
    size = GGML_QUANT_SIZES[kind][1]
    scale, low = STEPS[kind](data.reshape(-1, size))
    return scale.view(len(data), -1), low.view(len(data), -1)
