"""Round to nearest: the smallest complete method, and the baseline for all others.

A scale is the largest magnitude it must reach over the largest number of the grid; each weight
becomes the nearest grid point. Scales and integers equal those of compressed-tensors' own
parameter calculation, bit for bit, with the division done in float32: in bf16 it would lose up to
half a step at 8 bits.
"""

import torch

from quantkit import grid
from quantkit.recipe import WeightScheme


class RoundToNearest:
    """Scales from the range of the weights, then rounding."""

    def quantize(self, weight: torch.Tensor, scheme: WeightScheme) -> grid.QuantizedWeight:
        """Round one layer's weight."""
        tiles = grid.tiles(weight, scheme)
        # Not aminmax: along a dimension it is several times slower on a CPU.
        scale, zero_point = grid.parameters(tiles.amin(-1), tiles.amax(-1), scheme)
        return grid.quantize(weight, scale, zero_point, scheme)
