"""Dequantises weights that bitsandbytes wrote. Read only.

For each layer its files hold:

    4 bits   weight                       two codes per byte, the first in the high nibble
             weight.quant_map             the 16 numbers that codes stand for (NF4 or FP4)
             weight.absmax                the scale of each block of 64: float32, or with double
             weight.nested_absmax,        quantisation a code into nested_quant_map, times one scale
             weight.nested_quant_map      per 256 blocks, plus an offset
             weight.quant_state.bitsandbytes__nf4    JSON: shape, block sizes, offset
    8 bits   weight (int8) and SCB        the largest magnitude of each row, over 127

As bitsandbytes 0.50 computes them (backends/default/ops.py, _ops.py): the products in float32.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.errors import SourceError
from quantkit.model.derived import DerivedTensor
from quantkit.model.headers import StoredTensor

if TYPE_CHECKING:
    import torch

KINDS = ("nf4", "fp4")
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
STATE = "quant_state.bitsandbytes__"
OVER_127 = 7.874015718698502e-3
"""The library's own constant."""
MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True)
class State:
    """The contents of the JSON next to a weight."""

    kind: str
    shape: tuple[int, int]
    block_size: int
    nested_block_size: int | None
    offset: float


def state_name(weight: str, tensors: Mapping[str, Any]) -> str | None:
    """The tensor that holds the JSON of a 4-bit weight; None for other weights."""
    names = (f"{weight}.{STATE}{kind}" for kind in KINDS)
    return next((name for name in names if name in tensors), None)


def owner(name: str, tensors: Mapping[str, Any]) -> str | None:
    """The 4-bit weight that a tensor belongs to; None where it belongs to none."""
    for part in (f".{STATE}", *(f".{part}" for part in PARTS)):
        weight, found, _ = name.partition(part)
        if found and weight.endswith("weight") and weight in tensors:
            return weight
    return None


def read_state(tensor: StoredTensor) -> State:
    """The JSON, checked."""
    where = f"{tensor.file.parent}: {tensor.name}"
    if tensor.size_bytes > MAX_STATE_BYTES:
        raise SourceError(f"{where} is too large for what it should hold; download it again")
    try:
        state = json.loads(bytes(tensor.read().tolist()))
        rows, columns = (int(n) for n in state["shape"])
        nested = state.get("nested_blocksize")
        return State(
            str(state["quant_type"]),
            (rows, columns),
            int(state["blocksize"]),
            None if nested is None else int(nested),
            float(state.get("nested_offset") or 0.0),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{where} is not what bitsandbytes writes: {error}") from error


def four_bits(
    weight: StoredTensor, tensors: Mapping[str, StoredTensor], dtype: str
) -> StoredTensor:
    """A weight in NF4 or FP4."""
    name = state_name(weight.name, tensors)
    assert name is not None
    state = read_state(tensors[name])
    wanted = PARTS if state.nested_block_size else PARTS[:2]
    parents = [weight]
    for part in wanted:
        found = tensors.get(f"{weight.name}.{part}")
        if found is None:
            raise SourceError(
                f"{weight.file.parent}: {weight.name} is quantised but {weight.name}.{part} is "
                "missing; download the model again"
            )
        parents.append(found)
    n = math.prod(state.shape)
    if weight.size_bytes != -(-n // 2):
        raise SourceError(
            f"{weight.file.parent}: {weight.name} has {weight.size_bytes} bytes, and "
            f"{list(state.shape)} in 4 bits take {-(-n // 2)}; download the model again"
        )
    return DerivedTensor.of(weight.name, dtype, state.shape, parents, partial(_four_bits, state))


def _four_bits(state: State, parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    import torch

    packed, absmax, numbers, *nested = parents
    if nested:
        assert state.nested_block_size is not None
        largest, outer = nested
        codes = outer.float()[absmax.long()]
        absmax = codes * _spread(largest.float(), state.nested_block_size, len(codes))
        absmax = absmax + state.offset
    raw = packed.contiguous().view(torch.uint8).flatten()
    n = math.prod(state.shape)
    values = numbers.float()[torch.stack((raw >> 4, raw & 15), -1).flatten()[:n].long()]
    return (values * _spread(absmax.float(), state.block_size, n)).reshape(state.shape)


def _spread(scales: "torch.Tensor", size: int, n: int) -> "torch.Tensor":
    """One scale for each of `n` numbers; the last block may be incomplete."""
    return scales.repeat_interleave(size)[:n]


def eight_bits(weight: StoredTensor, rows: StoredTensor, dtype: str) -> StoredTensor:
    """A weight in 8 bits, as LLM.int8() stores it."""
    return DerivedTensor.of(weight.name, dtype, weight.shape, [weight, rows], _eight_bits)


def _eight_bits(parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    values, rows = parents
    return values.float() * rows.float().reshape(-1, 1) * OVER_127
