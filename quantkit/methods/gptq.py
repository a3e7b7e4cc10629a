"""GPTQ: round one column after the other, and let the remaining ones compensate for the error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
https://arxiv.org/abs/2210.17323

With H = G the Gram matrix of the inputs and U the upper Cholesky factor of its inverse, rounding
column j leaves the error e = (w_j - q_j) / U_jj, and the columns after it absorb e * U_j,j+1...
Differences from the reference code: columns go in the order of diag(G), but scales come from groups
in the original order ("static groups"), so the file is a plain grouped one; scales are found by a
search for the least weighted error, not plain absmax; damping is raised step by step when the
matrix does not factor, and reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.methods.columns import BLOCK, DAMPING, Factor, kernel, update_block
from quantkit.methods.contract import PROPAGATE, Cost, Linears, Method, Option, Rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from quantkit import grid
    from quantkit.schemes import WeightScheme

HELD_OUT = Option("true or false", lambda value: isinstance(value, bool))
"""Whether some tokens are held out to decide between GPTQ and rounding to nearest."""
SCALES = Option("gram or diagonal", lambda value: value in ("gram", "diagonal"))
"""What the scales of integers are chosen by: the Gram matrix of each group, or its diagonal."""
SWEEPS = Option("a whole number from 0 to 20", lambda v: type(v) is int and 0 <= v <= 20)
"""Sweeps of coordinate descent over codes and scales after GPTQ itself."""
SIGNED = Option("true or false", lambda value: isinstance(value, bool))
"""Whether scales of symmetric integers may be negative: at few bits the range is larger
below zero.
"""
TUNE = Option("a whole number from 0 to 1000", lambda v: type(v) is int and 0 <= v <= 1000)
"""Steps of the gradient stage that the pass runs after each block."""
DISTIL = Option("a whole number from 0 to 100", lambda v: type(v) is int and 0 <= v <= 100)
"""Final passes over the calibration tokens in which all codes and scales are tuned together."""
PANEL = 1024
"""Columns per GPU block, which are updated with each other's errors at once; later columns are
updated together afterwards: a few large products, where block-by-block updates would read and write
all remaining columns each time.
"""
ENOUGH = 2
"""Tokens per matrix column that coordinate descent needs."""


class ColumnByColumn:
    """Scales by search, then GPTQ's rounding.

    Scales of integers minimise the error weighted by diag(G); those that come from a grid of their
    own minimise the error under the Gram matrix of their tile. Where tokens are held out, they
    decide for each linear between GPTQ and rounding to nearest with the same scales.
    """

    statistics = ("gram",)

    def cost(self, rows: int, columns: int) -> Cost:
        # Three products of halves for each of the two sweeps of coordinate descent.
        return Cost(4.0 * columns**3 + 12 * rows * columns**2, columns**3 / 3 + rows * columns**2)

    def round(self, linears: Linears) -> Rounded:
        from quantkit import grid
        from quantkit.methods import scales

        whole, matrix = scales.global_scale(linears), factor(_learnt(linears))
        scale, zero = _scales(linears)
        if matrix is None:
            nearest = grid.quantize(linears.weight, scale, zero, linears.scheme, whole)
            return Rounded(nearest, fallback=True)
        solved = solve(linears.weight, matrix, scale, zero, linears.scheme, whole)
        damping = matrix.damping
        del matrix  # as large as the Gram matrix
        return _judged(linears, *_refined(linears, solved), damping)

    def round_batch(self, batch: Sequence[Linears]) -> list[Rounded]:
        """Linears of one shape and scheme, such as experts, solved as one batch.

        Those whose matrix does not factor with the first damping are solved one by one.
        """
        from quantkit.methods import gptq_batch, scales

        matrices, factored = gptq_batch.factor([_learnt(linears) for linears in batch])
        found = [_scales(linears) for linears in batch]
        wholes = [scales.global_scale(linears) for linears in batch]
        weights = [linears.weight for linears in batch]
        solved = gptq_batch.solve(weights, matrices, found, wholes, batch[0].scheme)
        return [
            _judged(linears, *_refined(linears, one), DAMPING[0]) if ok else self.round(linears)
            for linears, one, ok in zip(batch, solved, factored, strict=True)
        ]


def _learnt(linears: Linears) -> torch.Tensor:
    """The Gram matrix of the tokens that are not held out."""
    held = linears.inputs.held_out
    return linears.inputs.gram if held is None else linears.inputs.gram - held


def _refined(
    linears: Linears, solved: grid.QuantizedWeight
) -> tuple[grid.QuantizedWeight, torch.Tensor | None]:
    """The same after coordinate descent, where there are enough tokens for it.

    With the error of every row, where that is known for all tokens and the source's own weights.
    Not for experts: hundreds of small descents would take longer than everything else.
    """
    from quantkit.methods import refine

    sweeps = linears.options.get("sweeps", 0)
    if (
        not sweeps
        or linears.is_expert
        or linears.inputs.n_tokens < ENOUGH * linears.weight.shape[1]
    ):
        return solved, None
    made, errors = refine.refine(
        linears.weight, _learnt(linears), solved, linears.scheme, sweeps, linears.activations
    )
    return made, errors if linears.inputs.held_out is None else None


def _scales(linears: Linears) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero points by the search that the scheme and the options select."""
    from quantkit import numbers
    from quantkit.methods import rounding, scales

    weight, scheme = linears.weight, linears.scheme
    if linears.options.get("scales") == "gram" or numbers.of(scheme).has_own_scales:
        return scales.searched(linears), None
    importance = linears.inputs.gram.diagonal().contiguous()
    return rounding.clipped(
        linears,
        lambda scale, zero: rounding.weighted_errors(weight, scale, zero, importance, scheme),
    )


def _judged(
    linears: Linears,
    solved: grid.QuantizedWeight,
    row_errors: torch.Tensor | None,
    damping: float,
) -> Rounded:
    """For every linear, the rounding with the smaller output error on held-out tokens, if any."""
    import torch

    from quantkit import grid
    from quantkit.methods import products

    weight, scheme, held = linears.weight, linears.scheme, linears.inputs.held_out
    if held is None:
        return Rounded(solved, damping, errors=row_errors)
    nearest = grid.quantize(weight, solved.scale, solved.zero_point, scheme, solved.global_scale)
    matrix = products.Halves.of(held)
    heights = list(linears.heights) or [weight.shape[0]]
    size = _by_linear(products.row_energies(weight, matrix, exactly=False), heights)
    errors = {}
    for name, made in (("gptq", solved), ("rounding", nearest)):
        change = grid.dequantize(made, scheme).sub_(weight)
        errors[name] = _by_linear(products.row_energies(change, matrix), heights)
        errors[name] /= size.clamp(min=1e-30)
    rounds = errors["rounding"] < errors["gptq"]
    rows = torch.repeat_interleave(rounds, torch.tensor(heights, device=rounds.device))
    values = torch.where(rows[:, None], nearest.values, solved.values)
    made = grid.QuantizedWeight(values, solved.scale, solved.zero_point, solved.global_scale)
    return Rounded(made, damping, held_out=errors)


def _by_linear(rows: torch.Tensor, heights: list[int]) -> torch.Tensor:
    import torch

    return torch.stack([part.sum() for part in torch.split(rows, heights)])


GPTQ = Method(
    "round column by column, compensating the error in the rest",
    "GPTQ rounds a layer column by column, and lets the columns still to come make up for the "
    "error, judged by the inputs that the layer sees.",
    ColumnByColumn(),
    propagates=True,
    options={
        "propagate": PROPAGATE,
        "held_out": HELD_OUT,
        "scales": SCALES,
        "sweeps": SWEEPS,
        "tune": TUNE,
        "distil": DISTIL,
        "signed": SIGNED,
    },
    types=("int", "fp4"),
    modifiers=("GPTQModifier",),
)


def factor(gram: torch.Tensor) -> Factor | None:
    """Order, damp and factor; None when no damping helps.

    With the columns reversed, G = L L^T, and L's inverse reversed again is the upper factor of G's
    inverse: one factorisation and one triangular inverse, where the textbook inverts G and factors
    a second time.
    """
    import torch

    from quantkit.methods import products

    diagonal = gram.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    backwards = order.flip(0)
    mean = diagonal.mean()
    if not mean > 0:
        return None
    for damping in DAMPING:
        # One dimension at a time: for both at once torch allocates indices as large as G.
        damped = gram.index_select(0, backwards).index_select(1, backwards)
        # Also lifts channels that were never active above zero.
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if failed:
            continue
        turned = products.invert_lower_(lower).flip(0, 1)
        del lower
        upper = turned.contiguous()  # by rows
        del turned
        if upper.diagonal().isfinite().all():
            return Factor(upper, order, damping)
    return None


def solve(
    weight: torch.Tensor,
    factor: Factor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: WeightScheme,
    global_scale: torch.Tensor | None = None,
) -> grid.QuantizedWeight:
    """Round a float32 weight [rows, columns] with fixed scales."""
    import torch

    from quantkit import grid, numbers

    number = numbers.of(scheme)
    steps = number.steps(scale, global_scale)
    zeros = zero_point.float() if zero_point is not None else None
    is_fp4 = scheme.kind == "fp4"
    values = codes(weight, factor, steps, zeros, number.limits, is_fp4)
    if is_fp4:
        values = values.view(torch.uint8)
    return grid.QuantizedWeight(values, scale, zero_point, global_scale)


def codes(
    weight: torch.Tensor,
    factor: Factor,
    steps: torch.Tensor,
    zeros: torch.Tensor | None,
    limits: tuple[float, float],
    is_fp4: bool = False,
) -> torch.Tensor:
    """GPTQ's codes, int8 [rows, columns], where weight = (code - zero) * step.

    Steps and zeros are float32 [rows, groups of a row].
    """
    import torch

    columns = weight.shape[1]
    tile = factor.order // (columns // steps.shape[1])
    remaining = weight.index_select(1, factor.order)
    steps = steps.contiguous()
    zeros = zeros.contiguous() if zeros is not None else None
    chosen = torch.empty_like(remaining, dtype=torch.int8)
    bottom, top = limits
    on_gpu = weight.device.type == "cuda"
    update = kernel() if on_gpu else update_block
    panel = PANEL if on_gpu else BLOCK
    for first in range(0, columns, panel):
        last = min(first + panel, columns)
        found = []
        for start in range(first, last, BLOCK):
            stop = min(start + BLOCK, last)
            errors = update(
                remaining[:, start:stop],
                chosen[:, start:stop],
                factor.upper[start:stop, start:stop],
                steps,
                zeros,
                tile[start:stop],
                bottom,
                top,
                is_fp4,
            )
            if stop < last:
                _compensate(remaining[:, stop:last], errors, factor.upper[start:stop, stop:last])
            found.append(errors)
        if last < columns:
            errors = torch.cat(found, 1) if len(found) > 1 else found[0]
            _compensate(remaining[:, last:], errors, factor.upper[first:last, last:])
    del remaining
    values = torch.empty_like(chosen)
    values[:, factor.order] = chosen
    return values


def _compensate(remaining: torch.Tensor, errors: torch.Tensor, upper: torch.Tensor) -> None:
    """Let the remaining columns compensate for errors."""
    from quantkit.methods import products

    if remaining.device.type == "cuda":
        products.add_precise_(remaining, errors, upper, alpha=-1)
    else:
        remaining.addmm_(errors, upper, alpha=-1)
