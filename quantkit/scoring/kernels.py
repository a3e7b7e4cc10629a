"""The Triton kernel of scoring; its torch twin is in `score.distribution`."""

import torch
import triton
import triton.language as tl

AT_ONCE = 32
"""Blocks of one row that a program reads."""


@triton.jit  # type: ignore[untyped-decorator]
def _block_sums(  # type: ignore[no-untyped-def]
    logits_ptr, peaks_ptr, sums_ptr, row_stride, vocabulary, n_blocks,
    SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    columns = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = columns < vocabulary
    logits = tl.load(logits_ptr + row * row_stride + columns, inside, float("-inf")).to(tl.float32)
    peaks = tl.maximum(tl.max(logits, 1), -1e30)
    sums = tl.sum(tl.exp(logits - peaks[:, None]), 1)
    tl.store(peaks_ptr + row * n_blocks + blocks, peaks, blocks < n_blocks)
    tl.store(sums_ptr + row * n_blocks + blocks, sums, blocks < n_blocks)


def block_sums(logits: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of every block of `size`, and the sum of exponentials relative to it."""
    n_rows, vocabulary = logits.shape
    n_blocks = triton.cdiv(vocabulary, size)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    peaks = torch.empty(n_rows, n_blocks, device=logits.device)
    sums = torch.empty_like(peaks)
    _block_sums[(n_rows, triton.cdiv(n_blocks, AT_ONCE))](
        logits, peaks, sums, logits.stride(0), vocabulary, n_blocks, size, AT_ONCE
    )
    return peaks, sums
