"""Arithmetic between weights and the number grid of a scheme.

The number formats themselves are in `numbers`, one module each.

A weight of shape [rows, columns] is viewed as tiles [rows, tiles per row, weights per tile] (a
single tile for strategy `tensor`, squares for `block`). Each tile has one scale and, unless
symmetric, one zero point: weight = (value - zero_point) * scale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from quantkit import numbers
from quantkit.schemes import WeightScheme

SEARCHED = 1 << 24
"""Scales that a search tries at once, which bounds its memory."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A layer's weight as quantised values."""

    values: torch.Tensor
    """int8, float8 or codes, in the shape of the weight."""
    scale: torch.Tensor
    """[rows, tiles per row] in the weight's dtype, or the number format's own; [1] for `tensor`."""
    zero_point: torch.Tensor | None
    """int8 in the shape of `scale`; None when symmetric."""
    global_scale: torch.Tensor | None = None
    """[1] in float32, by which all scales are divided; None for most number formats."""


def limits(scheme: WeightScheme) -> tuple[float, float]:
    """The smallest and largest value of the grid."""
    return numbers.of(scheme).limits


def tiles(weight: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """A weight, or values in its shape, viewed so that the last dimension shares a scale."""
    if scheme.strategy == "tensor":
        return weight.reshape(1, -1)
    rows, columns = weight.shape
    if scheme.strategy == "block":
        high, wide = scheme.block_structure or (1, 1)
        blocks = weight.reshape(rows // high, high, columns // wide, wide)
        return blocks.transpose(1, 2).reshape(rows // high, columns // wide, high * wide)
    size = columns if scheme.group_size is None else scheme.group_size
    assert isinstance(size, int)
    return weight.reshape(rows, -1, size)


def untile(values: torch.Tensor, shape: torch.Size, scheme: WeightScheme) -> torch.Tensor:
    """The inverse of `tiles`."""
    if scheme.strategy != "block":
        return values.reshape(shape)
    high, wide = scheme.block_structure or (1, 1)
    blocks = values.reshape(shape[0] // high, shape[1] // wide, high, wide)
    return blocks.transpose(1, 2).reshape(shape)


def parameters(
    low: torch.Tensor,
    high: torch.Tensor,
    scheme: WeightScheme,
    stored: torch.dtype | None = None,
    global_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero points for tiles with these extremes, in the dtype of the extremes.

    Zero is always representable. An all-zero tile gets the smallest harmless scale. With `stored`,
    scales are also representable in that dtype, so storing them in it loses nothing.
    """
    number = numbers.of(scheme)
    if number.has_own_scales:
        return number.scale(torch.maximum(low.abs(), high.abs()), global_scale), None
    bottom, top = number.limits
    low, high = low.clamp(max=0), high.clamp(min=0)
    if scheme.symmetric:
        scale = torch.maximum(low.abs(), high) / ((top - bottom) / 2)
    else:
        scale = (high - low) / (top - bottom)
    empty = scale == 0
    scale = torch.where(empty, torch.finfo(scale.dtype).eps, scale)
    if stored is not None:
        limit = torch.finfo(stored)
        scale = scale.clamp(limit.smallest_normal * limit.eps, limit.max).to(stored).to(scale.dtype)
    if scheme.symmetric:
        return scale, None
    zero_point = (bottom - low / scale).clamp(bottom, top).round().masked_fill(empty, 0)
    return scale, zero_point.to(torch.int8)


def quantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: WeightScheme,
    global_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Round every weight to the nearest value of its tile's grid."""
    number = numbers.of(scheme)
    scaled = tiles(weight, scheme).float() / number.steps(scale, global_scale).unsqueeze(-1)
    if zero_point is not None:
        scaled += zero_point.float().unsqueeze(-1)
    values = number.round(scaled)
    return QuantizedWeight(untile(values, weight.shape, scheme), scale, zero_point, global_scale)


def search_parameters(
    weight: torch.Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    errors_of: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    ratios: Sequence[float],
    stored: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero points at the clipping ratio of each tile's range with the least error.

    The whole range is tried first, and the first wins ties. A negative ratio makes a negative
    scale: integers reach further below zero than above it.

    Scales are rounded to `dtype` (and `stored`) before they are evaluated: `errors_of` maps scales
    and zero points of all candidates, in a leading dimension, to the error of every tile. They are
    tried together, since one after the other a GPU waits for hundreds of small operations.
    """
    view = tiles(weight, scheme)
    low, high = view.amin(-1).to(dtype), view.amax(-1).to(dtype)
    tried = _column((1.0, *ratios), low.ndim, low.device)
    found = []
    for some in torch.split(tried, max(1, SEARCHED // low.numel())):
        part = some.abs()
        scale, zero = parameters((low * part).to(dtype), (high * part).to(dtype), scheme, stored)
        scale = scale.copysign(some.to(scale.dtype))
        found.append(_least(errors_of(scale, zero), scale, zero))
    if len(found) > 1:
        errors, scales, zeros = zip(*found, strict=True)
        zero = None if zeros[0] is None else torch.stack(zeros)
        found = [_least(torch.stack(errors), torch.stack(scales), zero)]
    _, scale, zero = found[0]
    return scale, zero


def _least(
    errors: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The candidate of every tile with the least error, the first on ties."""
    error, which = errors.min(0, keepdim=True)
    zero = None if zero_point is None else zero_point.gather(0, which)[0]
    return error[0], scale.gather(0, which)[0], zero


@cache
def _column(numbers: tuple[float, ...], n_after: int, device: torch.device) -> torch.Tensor:
    """Numbers in a leading dimension; kept, since a copy to a GPU waits for all work before it."""
    return torch.tensor(numbers, device=device).view(-1, *[1] * n_after)


def steps(weight: QuantizedWeight, scheme: WeightScheme) -> torch.Tensor:
    """Step size of each tile: what its values are multiplied by, in float32."""
    return numbers.of(scheme).steps(weight.scale, weight.global_scale)


def dequantize(weight: QuantizedWeight, scheme: WeightScheme) -> torch.Tensor:
    """The weights that the values represent, in float32."""
    number = numbers.of(scheme)
    values = number.widen(tiles(weight.values, scheme))
    if weight.zero_point is not None:
        values -= weight.zero_point.float().unsqueeze(-1)
    scaled = values.mul_(number.steps(weight.scale, weight.global_scale).unsqueeze(-1))
    return untile(scaled, weight.values.shape, scheme)


def fold(
    weight: torch.Tensor, in_scale: torch.Tensor | None, out_scale: torch.Tensor | None
) -> torch.Tensor:
    """Fold scales into a weight: multiply its columns, divide its rows."""
    if in_scale is not None:
        weight = weight * in_scale
    if out_scale is not None:
        weight = weight / out_scale[:, None]
    return weight


def unfold(
    weight: torch.Tensor, in_scale: torch.Tensor | None, out_scale: torch.Tensor | None
) -> torch.Tensor:
    """Undo `fold`."""
    if in_scale is not None:
        weight = weight / in_scale
    if out_scale is not None:
        weight = weight * out_scale[:, None]
    return weight


def relative_error(original: torch.Tensor, weight: torch.Tensor) -> float:
    """Norm of a weight's change relative to the norm of the weight."""
    wide = original.float()
    norm = torch.linalg.vector_norm(wide).clamp(min=1e-30)
    return (torch.linalg.vector_norm(wide - weight) / norm).item()
