"""What a calibration pass keeps of a layer's inputs: enough for every method.

    G = sum of x^T x      m = mean |x|      a = max |x|      n = tokens seen

G is symmetric: only blocks on and above its diagonal are computed, and mirrored at the end.
"""

from dataclasses import dataclass

import torch

HELD = 8
"""One of so many tokens is held out: those at the end of a batch, so that they are of other texts,
or at least of another part of a text, than the rest."""
SLAB = 1024
"""Rows of G that one product makes."""


@dataclass
class Statistics:
    """Sums over the inputs of one group of linears."""

    gram: torch.Tensor
    total: torch.Tensor
    max_abs: torch.Tensor
    n_tokens: int = 0
    held: torch.Tensor | None = None
    """G of held-out tokens alone, the last eighth of every batch; None where nobody asks."""
    drift: torch.Tensor | None = None
    """Sum of (wanted - seen)^T seen: how far inputs have moved from those of the source, by what
    was quantised before or by their own rounding; G is of seen ones. None where nobody asks."""
    held_drift: torch.Tensor | None = None
    """The same of held-out tokens alone."""

    @classmethod
    def zeros(
        cls, width: int, device: torch.device, held_out: bool = False, drifts: bool = False
    ) -> "Statistics":
        def square(wanted: bool) -> torch.Tensor | None:
            return torch.zeros(width, width, device=device) if wanted else None

        return cls(
            torch.zeros(width, width, device=device),
            torch.zeros(width, device=device),
            torch.zeros(width, device=device),
            held=square(held_out),
            drift=square(drifts),
            held_drift=square(drifts),
        )

    def add(
        self,
        inputs: torch.Tensor,
        seen: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """Count the tokens of one batch; `complete` is due after the last.

        `seen` is what the linears are given, where inputs are rounded first; `wanted` what the
        source's own would be given.
        """
        flat = inputs.reshape(-1, inputs.shape[-1])
        given = flat if seen is None else seen.reshape(flat.shape)
        last = slice(flat.shape[0] - flat.shape[0] // HELD, None)
        _add_products(self.gram, given)
        if self.held is not None:
            _add_products(self.held, given[last])
        if self.drift is not None and self.held_drift is not None:
            moved = (flat if wanted is None else wanted.reshape(flat.shape)) - given
            _add_cross(self.drift, moved, given)
            _add_cross(self.held_drift, moved[last], given[last])
        self.total += torch.linalg.vector_norm(flat, 1, 0, dtype=torch.float32)
        largest = torch.linalg.vector_norm(flat, float("inf"), 0)
        torch.maximum(self.max_abs, largest.float(), out=self.max_abs)
        self.n_tokens += flat.shape[0]

    def complete(self) -> None:
        """Fill the lower half of G."""
        for matrix in (self.gram, self.held):
            if matrix is None:
                continue
            for start in range(0, matrix.shape[0], SLAB):
                stop = start + SLAB
                matrix[stop:, start:stop] = matrix[start:stop, stop:].t()

    @property
    def mean_abs(self) -> torch.Tensor:
        return self.total / max(1, self.n_tokens)

    def scaled(self, scale: torch.Tensor) -> "Statistics":
        """The statistics of the same inputs divided by `scale`, channel by channel."""

        def divided(matrix: torch.Tensor | None) -> torch.Tensor | None:
            return None if matrix is None else (matrix / scale).div_(scale[:, None])

        return Statistics(
            (self.gram / scale).div_(scale[:, None]),
            self.total / scale,
            self.max_abs / scale,
            self.n_tokens,
            *(divided(matrix) for matrix in (self.held, self.drift, self.held_drift)),
        )


def _add_products(matrix: torch.Tensor, flat: torch.Tensor) -> None:
    """Add x^T x to the upper half of a matrix."""
    for start in range(0, flat.shape[1], SLAB):
        rows = flat[:, start : start + SLAB].t()
        slab = matrix[start : start + SLAB, start:]
        if flat.dtype == torch.float32:
            slab.addmm_(rows, flat[:, start:])
        else:
            # bf16 operands on the tensor cores, float32 sums.
            slab += torch.mm(rows, flat[:, start:], out_dtype=torch.float32)


def _add_cross(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add x^T y to a matrix."""
    if right.dtype == torch.float32:
        matrix.addmm_(left.t(), right)
    else:
        matrix += torch.mm(left.t(), right, out_dtype=torch.float32)
