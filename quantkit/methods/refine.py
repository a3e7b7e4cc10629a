"""Coordinate descent on codes and scales after GPTQ.

With D the change of a weight and G the Gram matrix of its inputs, tr(D G D^T) is the squared error
of the output. GPTQ walks over the columns once and never looks back; its scales were chosen before
any code. Here every code in turn moves to the best number of its grid given all others, and every
scale to the best number of its own type given all codes: both are one-dimensional parabolas, whose
best grid point is the one nearest to the vertex.

G is damped, by less from sweep to sweep. Many models give the first token of a text a hidden state
a thousand times as large as any other's (Sun et al., "Massive Activations in Large Language
Models", https://arxiv.org/abs/2402.17762), which makes one direction of G huge. Undamped sweeps
fitted that direction with codes that cost all other tokens many times what rounding does; damped
ones end with less of both errors. A row that gains nothing under G itself keeps its old codes, so
the error never rises.

Columns go in blocks: within a block a kernel iterates, and the moves reach the other columns as
matrix products. D G, the slope of the error, is the only state.
"""

from collections.abc import Callable

import torch

from quantkit import grid, numbers
from quantkit.methods import products
from quantkit.methods.columns import BLOCK, FP4_CODES
from quantkit.numbers import channel_scales
from quantkit.schemes import ActivationScheme, WeightScheme

PANEL = 1024
"""Columns that see each other's moves at once; all others see them together afterwards."""
DAMPING = 0.1
"""Relative to the mean of G's diagonal in the first sweep; the last uses about a hundredth
of that.
"""
ELEMENTS = 1 << 26
"""Weights per step, which bounds the memory of intermediate results."""


def refine(
    weight: torch.Tensor,
    gram: torch.Tensor,
    made: grid.QuantizedWeight,
    scheme: WeightScheme,
    sweeps: int,
    activations: ActivationScheme | None = None,
) -> tuple[grid.QuantizedWeight, torch.Tensor | None]:
    """The same weights with better codes and scales; rows that gain nothing keep theirs.

    Also the error of every row, unless there was nothing to do.
    """
    columns = weight.shape[1]
    size = columns // made.scale.shape[-1]
    if sweeps < 1 or scheme.strategy not in ("group", "tensor_group", "channel"):
        return made, None
    moves_scales = BLOCK % size == 0 and not channel_scales.apply_to(scheme, activations)
    halves = products.Halves.of(gram)
    diagonal = gram.diagonal().clone()
    values, scale = made.values.clone(), made.scale.clone()
    n_rows = max(1, ELEMENTS // columns)
    errors = []
    for start in range(0, weight.shape[0], n_rows):
        rows = slice(start, start + n_rows)
        zero = None if made.zero_point is None else made.zero_point[rows]
        part = grid.QuantizedWeight(values[rows], scale[rows], zero, made.global_scale)
        errors.append(_descend(weight[rows], gram, halves, part, scheme, sweeps, moves_scales))
        _set_diagonal(gram, halves, diagonal)
    before, after = (torch.cat(parts) for parts in zip(*errors, strict=True))
    gains = (after < before)[:, None]
    kind = torch.uint8 if scale.element_size() == 1 else scale.dtype
    scale = torch.where(gains, scale.view(kind), made.scale.view(kind)).view(scale.dtype)
    values = torch.where(gains, values, made.values)
    found = grid.QuantizedWeight(values, scale, made.zero_point, made.global_scale)
    return found, torch.minimum(before, after)


def _set_diagonal(gram: torch.Tensor, halves: products.Halves, diagonal: torch.Tensor) -> None:
    """Replace the diagonal of a matrix and its halves: a damped copy would take too much memory."""
    gram.diagonal().copy_(diagonal)
    if halves.low is not None:
        high = diagonal.to(halves.high.dtype)
        halves.high.diagonal().copy_(high)
        halves.low.diagonal().copy_(diagonal - high)


def _descend(
    weight: torch.Tensor,
    gram: torch.Tensor,
    halves: products.Halves,
    made: grid.QuantizedWeight,
    scheme: WeightScheme,
    sweeps: int,
    moves_scales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sweep over all blocks of columns; codes and scales of `made` change in place.

    Returns the error of every row before and after: with D G at hand, a sum.
    """
    number = numbers.of(scheme)
    columns = weight.shape[1]
    size = columns // made.scale.shape[1]
    steps = number.steps(made.scale, made.global_scale).contiguous()
    tile = torch.arange(columns, device=weight.device) // size
    bottom, top = number.limits
    descend: Callable[..., torch.Tensor] = descend_block
    if weight.device.type == "cuda":
        descend = _kernel()
    # Scales from a grid of their own are few enough to leave to torch.
    fused = moves_scales and descend is not descend_block and not number.has_own_scales
    scales = None
    if fused:
        zero = made.zero_point
        scales = made.scale, None if zero is None else zero.float().contiguous()
    change = grid.dequantize(made, scheme).sub_(weight)
    slope = products.precise(change, halves)
    before = (change * slope).sum(1)
    codes = made.values.view(torch.int8)
    diagonal, damped = gram.diagonal().clone(), 0.0
    mean = float(diagonal.mean())
    for sweep in range(sweeps):
        damping = _damping(mean, sweep, sweeps)
        if sweep:
            change = grid.dequantize(made, scheme).sub_(weight)
        slope.add_(change, alpha=damping - damped)
        del change
        _set_diagonal(gram, halves, diagonal + damping)
        damped = damping
        for start in range(0, columns, PANEL):
            panel = slice(start, min(start + PANEL, columns))
            near = slope[:, panel].clone()
            moved = torch.empty_like(near)
            for first in range(start, panel.stop, BLOCK):
                here = slice(first, min(first + BLOCK, columns))
                inside = slice(first - start, here.stop - start)
                square = gram[here, here]
                asked = (
                    near[:, inside], codes[:, here], square, steps, tile[here], bottom, top,
                    scheme.kind == "fp4",
                )  # fmt: skip
                if fused:
                    change = descend(*asked, scales, size, moved[:, inside])
                else:
                    change = descend(*asked)
                    if moves_scales:
                        own = near[:, inside] + change @ square
                        _fit_scales(change, own, square, made, here, steps, scheme)
                    moved[:, inside] = change
                # Accurate enough to choose by; updates to columns of other panels are exact.
                later = slice(here.stop, panel.stop)
                if later.start < later.stop:
                    other = halves.high[here, later]
                    products.add_(near[:, inside.stop :], change.to(other.dtype), other)
            products.add_precise_(slope, moved, _part(halves, panel, slice(None)))
    change = grid.dequantize(made, scheme).sub_(weight)
    slope.add_(change, alpha=-damped)
    return before, slope.mul_(change).sum(1)


def sweep_codes(
    change: torch.Tensor,
    codes: torch.Tensor,
    steps: torch.Tensor,
    limits: tuple[float, float],
    gram: torch.Tensor,
    halves: products.Halves,
    sweeps: int,
) -> None:
    """Move each code in turn to its best value on grids that stay; codes change in place.

    `change` is how far the weights [rows, columns] are off, and is used up; `steps` [rows, groups]
    is how far a code moves a weight.
    """
    columns = change.shape[1]
    tile = torch.arange(columns, device=change.device) // (columns // steps.shape[1])
    descend = _kernel() if change.device.type == "cuda" else descend_block
    slope = products.precise(change, halves)
    diagonal, damped = gram.diagonal().clone(), 0.0
    mean = float(diagonal.mean())
    for sweep in range(sweeps):
        damping = _damping(mean, sweep, sweeps)
        slope.add_(change, alpha=damping - damped)
        _set_diagonal(gram, halves, diagonal + damping)
        damped = damping
        for first in range(0, columns, BLOCK):
            here = slice(first, min(first + BLOCK, columns))
            moved = descend(
                slope[:, here], codes[:, here], gram[here, here], steps, tile[here], *limits
            )
            change[:, here] += moved
            products.add_precise_(slope, moved, _part(halves, here, slice(None)))
    _set_diagonal(gram, halves, diagonal)


def _damping(mean: float, sweep: int, sweeps: int) -> float:
    """What a sweep adds to G's diagonal."""
    return mean * DAMPING * float(0.01 ** (sweep / sweeps))


def _fit_scales(
    moved: torch.Tensor,
    slope: torch.Tensor,
    gram: torch.Tensor,
    made: grid.QuantizedWeight,
    here: slice,
    steps: torch.Tensor,
    scheme: WeightScheme,
) -> None:
    """The best stored scale of every tile of a block; adds the resulting moves to `moved`."""
    number = numbers.of(scheme)
    size = made.values.shape[1] // made.scale.shape[1]
    for first in range(here.start, here.stop, size):
        inside = slice(first - here.start, first - here.start + size)
        place = first // size
        plain = number.widen(made.values[:, first : first + size])
        if made.zero_point is not None:
            plain = plain - made.zero_point[:, place, None].float()
        curve = ((plain @ gram[inside, inside]) * plain).sum(1)
        vertex = steps[:, place] - (plain * slope[:, inside]).sum(1) / curve.clamp(min=1e-30)
        stored = number.nearest_scale(
            torch.where(curve > 0, vertex, steps[:, place]),
            made.scale[:, place],
            made.global_scale,
        )
        step = number.steps(stored, made.global_scale)
        change = plain.mul_((step - steps[:, place])[:, None])
        moved[:, inside] += change
        slope += change @ gram[inside]
        steps[:, place] = step
        made.scale[:, place] = stored


def _part(halves: products.Halves, rows: slice, columns: slice) -> products.Halves:
    low = None if halves.low is None else halves.low[rows, columns]
    return products.Halves(halves.high[rows, columns], low)


def _kernel() -> Callable[..., torch.Tensor]:
    from quantkit.methods.kernels import descend_block as kernel

    return kernel.descend_block


def descend_block(
    slope: torch.Tensor,
    chosen: torch.Tensor,
    gram: torch.Tensor,
    scale: torch.Tensor,
    tile: torch.Tensor,
    bottom: float,
    top: float,
    is_fp4: bool = False,
) -> torch.Tensor:
    """Move each code of one block in turn to its best value; returns how far the weights moved.

    `slope` is D G of the block's columns, before; `tile` maps each column to its column of `scale`.
    Zero points do not matter here: only how far a code moves.
    """
    # By columns, as in `columns.update_block`.
    slopes, steps, codes = (one.t().contiguous() for one in (slope, scale, chosen))
    moved = torch.zeros_like(slopes)
    pivots = gram.diagonal().tolist()
    for j, place in enumerate(tile.tolist()):
        if not pivots[j] > 0:
            continue
        step, code = steps[place], codes[j]
        before = FP4_CODES.widen(code.view(torch.uint8)) if is_fp4 else code.float()
        vertex = before - slopes[j] / (step * pivots[j])
        if is_fp4:
            found = FP4_CODES.round(vertex)
            after = FP4_CODES.widen(found)
            codes[j] = found.view(torch.int8)
        else:
            codes[j] = after = vertex.round_().clamp_(bottom, top)
        change = torch.sub(after, before, out=moved[j]).mul_(step)
        slopes[j + 1 :].addr_(gram[j, j + 1 :], change)
    chosen.copy_(codes.t())
    return moved.t().contiguous()
