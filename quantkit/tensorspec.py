"""A tensor's description before its data exists: name, dtype and shape."""

import math
from dataclasses import dataclass

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
}
"""Bytes per element, by safetensors' dtype names."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.n_elements * ITEM_BYTES[self.dtype]
