"""Triton kernels for a block's norms and gated units; their torch twins are in `quick`.

They round where the modules of transformers do, so one number in ten thousand differs, in its last
bit.
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
