"""One file a method. A method is arithmetic: it opens no file, prints nothing, chooses no path."""

from typing import Protocol

import torch

from quantkit.grid import QuantizedWeight
from quantkit.schemes import WeightScheme


class Method(Protocol):
    """Weights in, quantised weights out."""

    def quantize(self, weight: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
        """Choose the numbers that stand for one layer's weight."""
