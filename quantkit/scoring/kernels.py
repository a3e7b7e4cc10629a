"""The Triton kernels of scoring; torch twins are in `distribution`, `divergence` and `rows`."""

import torch
import triton
import triton.language as tl

AT_ONCE = 32
"""Blocks of one row per program."""
COLUMNS = 1024
STEPS = 16
"""Reads of `COLUMNS` logits per program that sums a divergence."""


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


@triton.jit  # type: ignore[untyped-decorator]
def _divergence(  # type: ignore[no-untyped-def]
    source_ptr, candidate_ptr, source_norm_ptr, candidate_norm_ptr, sums_ptr,
    source_stride, candidate_stride, vocabulary, n_parts,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source_norm = tl.load(source_norm_ptr + row)
    candidate_norm = tl.load(candidate_norm_ptr + row)
    sums = tl.zeros([COLUMNS], tl.float32)
    for step in range(STEPS):
        columns = (part * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < vocabulary
        theirs = tl.load(source_ptr + row * source_stride + columns, inside, float("-inf"))
        mine = tl.load(candidate_ptr + row * candidate_stride + columns, inside, float("-inf"))
        theirs = theirs.to(tl.float32) - source_norm
        mine = mine.to(tl.float32) - candidate_norm
        gap = theirs - mine
        p, q = tl.exp(theirs), tl.exp(mine)
        near = gap * (1 / 40320) - 1 / 5040
        near = near * gap + 1 / 720
        near = near * gap - 1 / 120
        near = near * gap + 1 / 24
        near = near * gap - 1 / 6
        near = (near * gap + 0.5) * gap * gap * p
        terms = tl.where(tl.abs(gap) < NEAR, near, p * gap + (q - p))
        terms = tl.where(p > 0.0, terms, q)
        sums += tl.where(terms < 0.0, 0.0, terms)
    tl.store(sums_ptr + row * n_parts + part, tl.sum(sums, 0))


def divergence(
    source: torch.Tensor,
    candidate: torch.Tensor,
    source_normaliser: torch.Tensor,
    candidate_normaliser: torch.Tensor,
    near: float,
) -> torch.Tensor:
    """KL(source || candidate) of rows of logits with known normalisers, reading both once.

    Where log-probabilities differ by less than `near`, by the series of the twin.
    """
    n_rows, vocabulary = source.shape
    source, candidate = (
        logits if logits.stride(1) == 1 else logits.contiguous() for logits in (source, candidate)
    )
    n_parts = triton.cdiv(vocabulary, COLUMNS * STEPS)
    sums = torch.empty(n_rows, n_parts, device=source.device)
    if n_rows:
        _divergence[(n_rows, n_parts)](
            source, candidate, source_normaliser, candidate_normaliser, sums,
            source.stride(0), candidate.stride(0), vocabulary, n_parts,
            COLUMNS=COLUMNS, STEPS=STEPS, NEAR=near, num_warps=4,
        )  # fmt: skip
    return sums.sum(1)


@triton.jit  # type: ignore[untyped-decorator]
def _row_attention(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, lengths_ptr, out_ptr, scale,
    key_row, key_head, key_token, value_row, value_head, value_token, n_heads,
    GROUP: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    members, dims = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    at_query = ((row * n_heads + head) * GROUP + members)[:, None] * WIDTH + dims[None, :]
    is_member = (members < GROUP)[:, None]
    query = tl.load(query_ptr + at_query, is_member, 0.0)
    keys = key_ptr + row * key_row + head * key_head
    values = value_ptr + row * value_row + head * value_head
    peaks = tl.full([PADDED], -1e30, tl.float32)
    sums = tl.zeros([PADDED], tl.float32)
    found = tl.zeros([PADDED, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < length
        key = tl.load(keys + tokens[:, None] * key_token + dims[None, :], inside[:, None], 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -1e30)
        higher = tl.maximum(peaks, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        before = tl.exp(peaks - higher)
        sums = sums * before + tl.sum(weights, 1)
        value = tl.load(
            values + tokens[:, None] * value_token + dims[None, :], inside[:, None], 0.0
        )
        more = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        found = found * before[:, None] + more
        peaks = higher
    found = found / sums[:, None]
    tl.store(out_ptr + at_query, found.to(out_ptr.dtype.element_ty), is_member)


def row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of queries [rows, key heads, group, width] to the first `lengths` tokens of each
    row.
    """
    query = query.contiguous()
    n_rows, n_heads, group, width = query.shape
    out = torch.empty_like(query)
    _row_attention[(n_rows, n_heads)](
        query, key, value, lengths, out, scale,
        *key.stride()[:3], *value.stride()[:3], n_heads,
        group, max(16, triton.next_power_of_2(group)), width, 64 if width <= 128 else 32,
    )  # fmt: skip
    return out
