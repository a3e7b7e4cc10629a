"""Triton kernels for a block's norms, gated units and rotary embeddings.

Their torch twins are in `fast_modules` and `rotary`. They round where the modules of transformers
do, so one number in ten thousand of the first two differs, in its last bit.
"""

import torch
import triton
import triton.language as tl

ELEMENTS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    states_ptr, weight_ptr, out_ptr, n_columns, epsilon, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * n_columns
    columns = tl.arange(0, COLUMNS)
    inside = columns < n_columns
    states = tl.load(states_ptr + row + columns, inside, 0.0).to(tl.float32)
    mean = tl.sum(states * states, 0) / n_columns
    normed = (states * tl.rsqrt(mean + epsilon)).to(out_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + columns, inside, 0.0)
    tl.store(out_ptr + row + columns, weight * normed, inside)


def norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS-normalise every vector of contiguous states, times the weight."""
    out = torch.empty_like(states)
    width = states.shape[-1]
    if states.numel():
        _norm[(states.numel() // width,)](
            states, weight, out, width, epsilon, COLUMNS=triton.next_power_of_2(width), num_warps=8
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gated(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, n_elements, ELEMENTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < n_elements
    gate = tl.load(gate_ptr + at, inside, 0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, active * tl.load(up_ptr + at, inside, 0.0), inside)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU of `gate` times `up`, both contiguous, element by element."""
    out = torch.empty_like(gate)
    if gate.numel():
        _gated[(triton.cdiv(gate.numel(), ELEMENTS),)](
            gate, up, out, gate.numel(), ELEMENTS=ELEMENTS, num_warps=8
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_heads(  # type: ignore[no-untyped-def]
    states_ptr, out_ptr, n_heads, by_head, half, cos, sin, cos_after, sin_after,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    heads, columns = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (heads < n_heads)[:, None] & (columns < half)[None, :]
    at = heads[:, None] * by_head + columns[None, :]
    first = tl.load(states_ptr + at, inside, 0.0).to(tl.float32)
    second = tl.load(states_ptr + at + half, inside, 0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    # Each product is rounded before they are added, as it is in transformers.
    left, added = (first * cos).to(kind), (-second * sin).to(kind)
    tl.store(out_ptr + at, (left.to(tl.float32) + added.to(tl.float32)).to(kind), inside)
    right, added = (second * cos_after).to(kind), (first * sin_after).to(kind)
    tl.store(out_ptr + at + half, (right.to(tl.float32) + added.to(tl.float32)).to(kind), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_out_ptr, key_out_ptr, half,
    n_queries, query_batch, query_head, query_place, n_keys, key_batch, key_head, key_place,
    cos_batch, cos_place, sin_batch, sin_place,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    place, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, HALF)
    inside = columns < half
    cos_ptr += batch * cos_batch + place * cos_place + columns
    sin_ptr += batch * sin_batch + place * sin_place + columns
    cos = tl.load(cos_ptr, inside, 0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr, inside, 0.0).to(tl.float32)[None, :]
    cos_after = tl.load(cos_ptr + half, inside, 0.0).to(tl.float32)[None, :]
    sin_after = tl.load(sin_ptr + half, inside, 0.0).to(tl.float32)[None, :]
    at = batch * query_batch + place * query_place
    _rotate_heads(
        query_ptr + at, query_out_ptr + at, n_queries, query_head, half,
        cos, sin, cos_after, sin_after, QUERIES, HALF,
    )  # fmt: skip
    at = batch * key_batch + place * key_place
    _rotate_heads(
        key_ptr + at, key_out_ptr + at, n_keys, key_head, half,
        cos, sin, cos_after, sin_after, KEYS, HALF,
    )  # fmt: skip


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys [batch, heads, positions, width], laid out densely in any order."""
    batch, n_queries, positions, width = query.shape
    n_keys, half = key.shape[1], width // 2
    out = torch.empty_like(query), torch.empty_like(key)
    shared = len(cos) == 1
    _rotate[(positions, batch)](
        query, key, cos, sin, *out, half,
        n_queries, *query.stride()[:3], n_keys, *key.stride()[:3],
        0 if shared else cos.stride(0), cos.stride(1),
        0 if shared else sin.stride(0), sin.stride(1),
        QUERIES=triton.next_power_of_2(n_queries), KEYS=triton.next_power_of_2(n_keys),
        HALF=triton.next_power_of_2(half), num_warps=4,
        enable_fp_fusion=False,  # fused, the first product of each sum would not be rounded
    )  # fmt: skip
    return out
