"""What a calibration pass keeps of a layer's inputs: enough for every method.

    G = sum of x^T x      m = mean |x|      a = max |x|      n = tokens seen

G is symmetric: only blocks on and above its diagonal are computed, and mirrored at the end.
"""

from dataclasses import dataclass

import torch

SLAB = 1024
"""Rows of G that one product makes."""


@dataclass
class Statistics:
    """Sums over the inputs of one group of linears."""

    gram: torch.Tensor
    total: torch.Tensor
    max_abs: torch.Tensor
    n_tokens: int = 0

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> "Statistics":
        return cls(
            torch.zeros(width, width, device=device),
            torch.zeros(width, device=device),
            torch.zeros(width, device=device),
        )

    def add(self, inputs: torch.Tensor) -> None:
        """Count the tokens of one batch; `complete` is due after the last."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        for start in range(0, flat.shape[1], SLAB):
            rows = flat[:, start : start + SLAB].t()
            slab = self.gram[start : start + SLAB, start:]
            if flat.dtype == torch.float32:
                slab.addmm_(rows, flat[:, start:])
            else:
                # bf16 operands on the tensor cores, float32 sums.
                slab += torch.mm(rows, flat[:, start:], out_dtype=torch.float32)
        self.total += torch.linalg.vector_norm(flat, 1, 0, dtype=torch.float32)
        largest = torch.linalg.vector_norm(flat, float("inf"), 0)
        torch.maximum(self.max_abs, largest.float(), out=self.max_abs)
        self.n_tokens += flat.shape[0]

    def complete(self) -> None:
        """Fill the lower half of G."""
        for start in range(0, self.gram.shape[0], SLAB):
            stop = start + SLAB
            self.gram[stop:, start:stop] = self.gram[start:stop, stop:].t()

    @property
    def mean_abs(self) -> torch.Tensor:
        return self.total / max(1, self.n_tokens)

    def scaled(self, scale: torch.Tensor) -> "Statistics":
        """The statistics of the same inputs divided by `scale`, channel by channel."""
        return Statistics(
            (self.gram / scale).div_(scale[:, None]),
            self.total / scale,
            self.max_abs / scale,
            self.n_tokens,
        )
