"""Round to nearest: the smallest complete method, and the baseline for all others.

A scale is the largest magnitude it must reach over the largest number of the grid; each weight
becomes the nearest grid point. Scales and integers equal those of compressed-tensors' own
parameter calculation, bit for bit, with the division done in float32: in bf16 it would lose up to
half a step at 8 bits.
"""

import torch

from quantkit import grid
from quantkit.schemes import WeightScheme


class RoundToNearest:
    """Scales from the range of the weights, then rounding."""

    def __init__(
        self, stored: torch.dtype | None = None, largest: torch.Tensor | None = None
    ) -> None:
        """`stored` is a type that scales must fit into.

        `largest` is the magnitude that a tensor's one scale must reach, where others share it.
        """
        self._stored = stored
        self._largest = largest

    def quantize(self, weight: torch.Tensor, scheme: WeightScheme) -> grid.QuantizedWeight:
        """Round one layer's weight."""
        if self._largest is not None:
            low, high = -self._largest.reshape(1), self._largest.reshape(1)
        else:
            tiles = grid.tiles(weight, scheme)
            # Not aminmax: along a dimension it is several times slower on a CPU.
            low, high = tiles.amin(-1), tiles.amax(-1)
        scale, zero_point = grid.parameters(low, high, scheme, self._stored)
        return grid.quantize(weight, scale, zero_point, scheme)
