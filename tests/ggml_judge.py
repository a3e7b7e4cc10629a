"""ggml itself as the judge of our GGUF arithmetic: its bytes for a tensor, and how ours compare.

Needs the packages `libggml` (ggml, built) and `gguf`; tests that import this skip without them.
"""

import ctypes
import functools
import itertools
import platform
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

libggml = pytest.importorskip("libggml")
gguf = pytest.importorskip("gguf")

FLOATS = ctypes.POINTER(ctypes.c_float)
IS_EXACT = platform.machine() in ("x86_64", "AMD64")
"""Whether ggml's bytes can be compared: elsewhere it is built with fused multiply-adds.

Its search then takes another of several near-equal scales for one block in fifty (the same C code,
compiled with and without contraction, shows it), and goes astray where a handful of weights decide.
"""
ABOUT_THE_SAME = 1.03
"""Our error over ggml's on ordinary weights, where only that can be compared."""


class Comparison(NamedTuple):
    """Our blocks against ggml's."""

    identical: float
    """Share of blocks with the same bytes."""
    worst_gap: float
    """Of the blocks that differ, the largest (our error - ggml's) / ggml's; 0 if none is worse.

    An error below a billionth of the block's own square counts as that: it is rounding.
    """
    total_ratio: float
    """Our error over ggml's, all blocks together; 1 when both are nothing."""


@functools.cache
def library() -> ctypes.CDLL:
    folder = Path(libggml.__path__[0])
    found = next(itertools.chain(folder.rglob("libggml-base.so"), folder.rglob("libggml-base.*")))
    loaded = ctypes.CDLL(str(found))
    loaded.ggml_quantize_init.argtypes = [ctypes.c_int]
    loaded.ggml_quantize_init.restype = None
    integers = [ctypes.c_int64] * 3
    loaded.ggml_quantize_chunk.argtypes = [ctypes.c_int, FLOATS, ctypes.c_void_p, *integers, FLOATS]
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    return loaded


def quantize(
    x: torch.Tensor, kind: gguf.GGMLQuantizationType, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """What ggml makes of x [rows, columns]: uint8 [rows, bytes per row]."""
    rows, columns = x.shape
    block_columns, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert columns % block_columns == 0
    source = np.ascontiguousarray(x.detach().cpu().float().numpy())
    out = np.zeros((rows, columns // block_columns * block_bytes), np.uint8)
    weights = None
    if importance is not None:
        assert importance.shape == (columns,)
        weights = np.ascontiguousarray(importance.detach().cpu().float().numpy())
    ggml = library()
    ggml.ggml_quantize_init(kind)
    written = ggml.ggml_quantize_chunk(
        kind,
        source.ctypes.data_as(FLOATS),
        out.ctypes.data,
        0,
        rows,
        columns,
        None if weights is None else weights.ctypes.data_as(FLOATS),
    )
    assert written == out.nbytes
    return torch.from_numpy(out)


def dequantize(data: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """The numbers that bytes [rows, bytes per row] stand for, float32 [rows, columns]."""
    return torch.from_numpy(gguf.quants.dequantize(data.cpu().contiguous().numpy(), kind))


def block_errors(
    x: torch.Tensor,
    data: torch.Tensor,
    kind: gguf.GGMLQuantizationType,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted squared error of every block, float64 [rows, blocks per row]."""
    return _block_sums((dequantize(data, kind).double() - x.cpu().double()).square(), kind, weights)


def _block_sums(
    squares: torch.Tensor, kind: gguf.GGMLQuantizationType, weights: torch.Tensor | None
) -> torch.Tensor:
    if weights is not None:
        squares = squares * weights.cpu().double()
    return squares.view(len(squares), -1, gguf.GGML_QUANT_SIZES[kind][0]).sum(-1)


def compare(
    x: torch.Tensor,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    kind: gguf.GGMLQuantizationType,
    weights: torch.Tensor | None = None,
) -> Comparison:
    """Our bytes against ggml's; `weights` [columns] or [rows, columns] weigh the squared errors."""
    assert ours.dtype == theirs.dtype == torch.uint8
    assert ours.shape == theirs.shape
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    differ = (ours.cpu() != theirs.cpu()).view(len(x), -1, block_bytes).any(-1)
    our_error = block_errors(x, ours, kind, weights)
    their_error = block_errors(x, theirs, kind, weights)
    assert torch.isfinite(our_error[torch.isfinite(their_error)]).all(), "NaN where ggml has none"
    floor = (1e-9 * _block_sums(x.cpu().double().square(), kind, weights)).clamp(min=1e-300)
    gap = ((our_error - their_error) / torch.maximum(their_error, floor))[differ]
    ours_total, theirs_total = our_error.nansum().item(), their_error.nansum().item()
    return Comparison(
        identical=1 - differ.double().mean().item(),
        worst_gap=max(0.0, gap.nan_to_num(0.0).max().item()) if differ.any() else 0.0,
        total_ratio=1.0 if ours_total == theirs_total else ours_total / max(theirs_total, 1e-300),
    )
