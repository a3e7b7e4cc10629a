"""What a calibration pass keeps of a layer's inputs: enough for every method.

    G = sum of x^T x      m = mean |x|      a = max |x|      n = tokens seen

G is symmetric: only blocks on and above its diagonal are computed, and mirrored at the end. Where
all later tokens read what a layer makes of a sample's first token, that token counts in G as much
as a share of the whole sample.
"""

from dataclasses import dataclass

import torch

from quantkit.methods import products

HOLD_OUT_EVERY = 8
"""One in this many tokens is held out: those at the end of a batch, so that they come from other
texts, or at least another part of a text, than the rest.
"""
FIRST_SHARE = 1 / 16
"""What the first token of a sample counts in G of queries, keys and values, as a share of the
sample's tokens. Attention rests on the first token wherever it has nothing to look for, so that an
error in its keys and values reaches every other token.
"""
SLAB = 1024
"""Rows of G per product."""


@dataclass
class Statistics:
    """Sums over the inputs of one group of linears."""

    gram: torch.Tensor
    total: torch.Tensor
    max_abs: torch.Tensor
    n_tokens: int = 0
    held_out: torch.Tensor | None = None
    """G of the held-out tokens alone, the last eighth of every batch; None where not requested."""

    @classmethod
    def zeros(cls, width: int, device: torch.device, held_out: bool = False) -> "Statistics":
        return cls(
            torch.zeros(width, width, device=device),
            torch.zeros(width, device=device),
            torch.zeros(width, device=device),
            held_out=torch.zeros(width, width, device=device) if held_out else None,
        )

    def add(self, inputs: torch.Tensor) -> None:
        """Accumulate the tokens of one batch; call `complete` after the last."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        # Held-out tokens are added to the rest at the end: no token is multiplied twice.
        n_taught = self._n_taught(flat.shape[0])
        _add_products(self.gram, flat[:n_taught])
        if self.held_out is not None:
            _add_products(self.held_out, flat[n_taught:])
        add_magnitudes_(self.total, self.max_abs, flat)
        self.n_tokens += flat.shape[0]

    def emphasise(self, first: torch.Tensor, lengths: torch.Tensor, n_tokens: int) -> None:
        """Count the first token of every sample of a batch of `n_tokens` more than once."""
        weights = (FIRST_SHARE * lengths.float() - 1).clamp(min=0)
        held_out = lengths.cumsum(0) - lengths >= self._n_taught(n_tokens)
        for matrix, others in ((self.gram, held_out), (self.held_out, ~held_out)):
            if matrix is not None:
                roots = weights.masked_fill(others, 0).sqrt()
                _add_products(matrix, roots[:, None] * first.float())

    def _n_taught(self, n_tokens: int) -> int:
        """How many tokens at the beginning of a batch are not held out."""
        return n_tokens - (0 if self.held_out is None else n_tokens // HOLD_OUT_EVERY)

    def complete(self) -> None:
        """Fill the lower half of G, and add the held-out tokens."""
        if self.held_out is not None:
            self.gram += self.held_out
        for matrix in (self.gram, self.held_out):
            if matrix is None:
                continue
            for start in range(0, matrix.shape[0], SLAB):
                stop = start + SLAB
                matrix[stop:, start:stop] = matrix[start:stop, stop:].t()

    @property
    def mean_abs(self) -> torch.Tensor:
        return self.total / max(1, self.n_tokens)

    def scaled(self, scale: torch.Tensor) -> "Statistics":
        """The statistics of the same inputs divided by `scale`, per channel."""
        return Statistics(
            (self.gram / scale).div_(scale[:, None]),
            self.total / scale,
            self.max_abs / scale,
            self.n_tokens,
            None if self.held_out is None else (self.held_out / scale).div_(scale[:, None]),
        )


def _add_products(matrix: torch.Tensor, flat: torch.Tensor) -> None:
    """Add x^T x to the upper half of a matrix."""
    for start in range(0, flat.shape[1], SLAB):
        rows = flat[:, start : start + SLAB].t()
        slab = matrix[start : start + SLAB, start:]
        products.add_(slab, rows, flat[:, start:])


def add_magnitudes_(total: torch.Tensor, largest: torch.Tensor, flat: torch.Tensor) -> None:
    """Add up the magnitudes of every column, and raise the largest ones."""
    if flat.device.type == "cuda":
        from quantkit.methods.kernels import magnitudes

        magnitudes.add_(total, largest, flat)
        return
    total += torch.linalg.vector_norm(flat, 1, 0, dtype=torch.float32)
    torch.maximum(largest, torch.linalg.vector_norm(flat, float("inf"), 0).float(), out=largest)
