"""The output error of a format, by rounding to nearest with searched scales.

Cheap enough to try every format on every unit: a few roundings each. What GPTQ leaves of a change
follows from the factor of its matrix, which all formats of a unit share.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quantkit import grid, methods, numbers
from quantkit.gguf import blocks, values
from quantkit.methods import gptq, products, rounding, scales
from quantkit.methods.contract import Linears
from quantkit.methods.statistics import Statistics
from quantkit.mixed.candidates import Candidate
from quantkit.mixed.gguf_candidates import GGUFCandidate
from quantkit.numbers.activations import round_inputs
from quantkit.schemes import WeightScheme
from quantkit.tensorspec import TensorSpec

RATIOS = (0.9, 0.8, 0.7)
"""Fractions of a group's range that its scale is tried with; 8 bits do not need it."""
SAMPLED_ROWS = {"cuda": 4096, "cpu": 128}
"""Rows of a weight that are searched for GGUF blocks."""
PROBE_BITS = 4
PROBE_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class Rows:
    """Linears of a unit that read one input, stacked, with the statistics of that input."""

    weight: torch.Tensor
    """In float32."""
    dtype: torch.dtype
    """Dtype of the stored weights."""
    statistics: Statistics
    inputs: torch.Tensor | None = None
    """A sample of raw inputs."""
    largest: torch.Tensor | None = None
    """Largest magnitude of all weights that share a global scale with these."""
    weighed: bool = True
    """Whether a file's blocks are searched with the importance of inputs."""


AnyCandidate = Candidate | GGUFCandidate


@dataclass(frozen=True)
class Solver:
    """What GPTQ leaves of a change, from that of rounding each weight on its own.

    With U the upper factor of the inverse of the damped Gram matrix, GPTQ moves weights by
    d_j / U_jj times row j of U for column j's rounding error d_j. Its errors are as large as those
    of plain rounding, so these stand for them: no column has to wait for those before it.
    """

    order: torch.Tensor
    diagonal: torch.Tensor
    upper: products.Halves

    @classmethod
    def of(cls, gram: torch.Tensor) -> "Solver | None":
        found = gptq.factor(gram)
        if found is None:
            return None
        return cls(found.order, found.upper.diagonal(), products.Halves.of(found.upper))

    def left(self, change: torch.Tensor) -> torch.Tensor:
        """The change that GPTQ makes."""
        moved = products.coarse(self._errors(change), self.upper)
        return torch.empty_like(change).index_copy_(1, self.order, moved)

    def energy(self, change: torch.Tensor) -> torch.Tensor:
        """The squared error of the outputs after GPTQ, by the damped matrix: U cancels."""
        return self._errors(change).square_().sum()

    def _errors(self, change: torch.Tensor) -> torch.Tensor:
        return change.index_select(1, self.order).div_(self.diagonal)


def error(
    rows: Rows,
    candidate: AnyCandidate,
    gram: products.Halves,
    solved: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The squared error of the outputs, summed over the tokens of the statistics; `solved` finds
    that of a change after GPTQ.
    """
    if candidate.is_exact or not fits(rows, candidate):
        return rows.weight.new_zeros(())
    if isinstance(candidate, GGUFCandidate):
        return _sampled_error(rows, candidate, gram)
    moved = change(rows, candidate)
    if candidate.by_gptq and solved is not None:
        found = solved(moved)
    else:
        found = products.row_energies(moved, gram, exactly=False).sum()
    if candidate.activations and rows.inputs is not None:
        found = found + _input_error(rows, candidate)
    return found


def _sampled_error(rows: Rows, candidate: GGUFCandidate, gram: products.Halves) -> torch.Tensor:
    """Extrapolated from evenly spaced rows: searching blocks takes longer than everything else."""
    step = -(-len(rows.weight) // SAMPLED_ROWS[rows.weight.device.type])
    some = replace(rows, weight=rows.weight[::step].contiguous())
    found, part, whole = (
        products.row_energies(weight, gram, exactly=False).sum()
        for weight in (change(some, candidate), some.weight, rows.weight)
    )
    return found * (whole / part.clamp(min=1e-30))


def fits(rows: Rows, candidate: AnyCandidate) -> bool:
    """Whether the rows are whole groups or blocks of the format."""
    spec = TensorSpec("", "BF16", tuple(rows.weight.shape))
    return candidate.size_bytes("", spec) is not None


def change(rows: Rows, candidate: AnyCandidate) -> torch.Tensor:
    """The rounded weights minus the weights."""
    if isinstance(candidate, GGUFCandidate):
        importance = rows.statistics.gram.diagonal() / max(1, rows.statistics.n_tokens)
        data = blocks.quantize(rows.weight, candidate.kind, importance if rows.weighed else None)
        return values.dequantize(data, candidate.kind).sub_(rows.weight)
    scheme = candidate.weights
    assert scheme is not None
    linears = Linears(
        rows.weight,
        rows.dtype,
        scheme,
        statistics=rows.statistics,
        largest=rows.largest,
        activations=candidate.activations,
    )
    if scheme.type == "int" and scheme.num_bits < 8:
        importance = rows.statistics.gram.diagonal().contiguous()
        scale, zero = grid.search_parameters(
            rows.weight,
            scheme,
            rows.dtype,
            lambda scale, zero: rounding.weighted_errors(
                rows.weight, scale, zero, importance, scheme
            ),
            RATIOS,
        )
        return rounding.change(rows.weight, scale, zero, scheme).float()
    if numbers.of(scheme).has_own_scales:
        whole = scales.global_scale(linears)
        made = grid.quantize(rows.weight, scales.searched(linears), None, scheme, whole)
    else:
        made = methods.find("rtn").rounding.round(linears).quantized
    return grid.dequantize(made, scheme).sub_(rows.weight)


def _input_error(rows: Rows, candidate: Candidate) -> torch.Tensor:
    """The error added by rounding the inputs, extrapolated from the sample to all."""
    scheme, kept = candidate.activations, rows.inputs
    assert scheme is not None
    assert kept is not None
    stored = None
    if scheme.is_static:
        stored = numbers.of(scheme).global_scale(rows.statistics.max_abs.max().to(rows.dtype))
    off = round_inputs(kept, scheme, stored).float() - kept.float()
    share = rows.statistics.n_tokens / max(1, len(kept))
    return (off @ rows.weight.t()).square().sum() * share


def probe_change(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A change of typical kind and size that depends on the weights alone: 4-bit integers."""
    columns = weight.shape[1]
    size = next((size for size in PROBE_SIZES if columns % size == 0), None)
    scheme = WeightScheme(
        num_bits=PROBE_BITS, strategy="group" if size else "channel", group_size=size
    )
    view = grid.tiles(weight, scheme)
    scale, _ = grid.parameters(view.amin(-1).to(dtype), view.amax(-1).to(dtype), scheme)
    rounded = grid.dequantize(grid.quantize(weight, scale, None, scheme), scheme)
    return rounded.sub_(weight)
