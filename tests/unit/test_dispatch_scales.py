"""Scales that are NaN: what kernels make of them, by the arithmetic that vLLM's own code has."""

import pytest
import torch

from quantkit.dispatch import scales
from quantkit.hardware import gpus, kernels
from quantkit.hardware.kernels import KernelQuery

LARGEST = 448.0


def packed(half_bits):
    """The upper byte that Marlin keeps of a scale in FP16 bits: its sign is shifted out."""
    return ((half_bits << 1) & 0xFFFF) >> 8


def as_bf16(byte):
    """Marlin in BF16: the first bit comes second, the others behind three zeros."""
    bits = (byte & 0x80) << 7 | (byte & 0x7F) << 4
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).item()


def as_fp16(byte):
    """Marlin in FP16: all bits behind a sign of zero."""
    return torch.tensor(byte << 7, dtype=torch.int16).view(torch.float16).item()


def half_bits(value):
    return int(torch.tensor(value, dtype=torch.float16).view(torch.int16)) & 0xFFFF


@pytest.mark.parametrize("nan", [0x7E00, 0x7F80, 0x7FFF], ids=hex)
def test_marlin_takes_nan_for_a_number_in_bf16_and_for_nan_in_fp16(nan):
    sound = as_bf16(packed(half_bits(LARGEST * 2**7)))
    for value in (256.0, 1.0, 0.875):
        other = as_bf16(packed(half_bits(value * 2**7)))
        assert other / sound == value / LARGEST  # scales that are there stay what they are
    found = as_bf16(packed(nan)) / sound * LARGEST
    assert scales.MARLIN_LEAST <= found <= scales.MARLIN_MOST
    assert found > LARGEST
    assert torch.tensor(as_fp16(packed(nan))).isnan()


@pytest.mark.parametrize(
    ("gpu", "dtype", "consequence"),
    [
        ("H200", "bfloat16", "accuracy"),
        ("H200", "float16", "garbage"),
        ("A100", "bfloat16", "accuracy"),
        ("H200", "float32", "accuracy"),
        ("T4", "bfloat16", "garbage"),
        ("B200", "bfloat16", "garbage"),
    ],
)
def test_the_consequence_follows_from_the_kernel(gpu, dtype, consequence):
    capability = round(gpus.find(gpu).capability * 10)
    chosen = kernels.choose(KernelQuery("nvfp4", 4096, 4096, capability, (0, 26), 4, 16))
    assert scales.of_nan("a layer", chosen[0], dtype, capability).consequence == consequence
