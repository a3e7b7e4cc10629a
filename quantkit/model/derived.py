"""Tensors that a source does not store as such: they are computed when they are read.

One expert of a fused tensor, a weight that is stored transposed or quantised: each has a name, a
dtype and a shape like any stored tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.model.headers import StoredTensor

if TYPE_CHECKING:
    import torch

Compute = Callable[[Sequence["torch.Tensor"]], "torch.Tensor"]
"""Computes one tensor from its parents, in their order."""


def _nothing(parents: Sequence["torch.Tensor"]) -> "torch.Tensor":
    raise AssertionError("a derived tensor must know how it is computed")


@dataclass(frozen=True)
class DerivedTensor(StoredTensor):
    """A tensor under its own name, and the stored ones that it is computed from."""

    parents: tuple[StoredTensor, ...] = ()
    compute: Compute = _nothing

    @classmethod
    def of(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        parents: Sequence[StoredTensor],
        compute: Compute,
    ) -> "DerivedTensor":
        """A tensor located where its first parent is."""
        first = parents[0]
        return cls(name, dtype, shape, first.file, first.start, tuple(parents), compute)

    def read(self, pinned: bool = False) -> "torch.Tensor":
        """The whole tensor, in its own memory."""
        from quantkit.model.shards import DTYPES

        found = self.compute([parent.read() for parent in self.parents])
        found = found.to(DTYPES[self.dtype]).contiguous()
        assert tuple(found.shape) == self.shape, f"{self.name} comes out as {list(found.shape)}"
        return found.pin_memory() if pinned else found

    def read_into(self, buffer: memoryview, offset: int = 0) -> None:
        """Fill `buffer` with this tensor's bytes, starting at `offset`."""
        from quantkit.model.shards import as_bytes

        buffer[:] = as_bytes(self.read())[offset : offset + len(buffer)]


def slice_of(tensor: StoredTensor, index: int) -> StoredTensor:
    """One entry of a tensor's first dimension, read without the others."""
    stride = tensor.size_bytes // tensor.shape[0]
    name = f"{tensor.name}[{index}]"
    start = tensor.start + index * stride
    return StoredTensor(name, tensor.dtype, tensor.shape[1:], tensor.file, start)


def rows_of(tensor: StoredTensor, name: str, start: int, stop: int) -> StoredTensor:
    """Some rows of a tensor under their own name."""
    stride = tensor.size_bytes // tensor.shape[0]
    shape = (stop - start, *tensor.shape[1:])
    return StoredTensor(name, tensor.dtype, shape, tensor.file, tensor.start + start * stride)
