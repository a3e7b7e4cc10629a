"""What plain rounding does to a weight, and what that costs: the objective of scale searches.

A fused kernel on a GPU, its torch twin here elsewhere.
"""

from collections.abc import Callable, Iterator

import torch

from quantkit import grid
from quantkit.methods import products
from quantkit.methods.contract import Linears
from quantkit.schemes import WeightScheme

CLIP_RATIOS = tuple(1 - 0.05 * step for step in range(1, 10))


def clipped(
    linears: Linears, errors: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero points that clip each tile where its error is smallest."""
    ratios = CLIP_RATIOS
    if linears.options.get("signed"):
        ratios += tuple(-ratio for ratio in (1.0, *CLIP_RATIOS))
    return grid.search_parameters(
        linears.weight, linears.scheme, linears.dtype, errors, ratios, linears.scale_dtype
    )


def change(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: WeightScheme,
) -> torch.Tensor:
    """The rounded weight minus the weight; on a GPU in bf16, for the tensor cores."""
    if _fused(weight, scheme):
        from quantkit.methods.kernels import round_tiles

        return round_tiles.change(weight, scale, zero_point, scheme)
    rounded = grid.dequantize(grid.quantize(weight, scale, zero_point, scheme), scheme)
    return rounded.sub_(weight)


def weighted_errors(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    importance: torch.Tensor,
    scheme: WeightScheme,
) -> torch.Tensor:
    """Squared change per tile, each column weighted by its importance.

    For every candidate: scales, zero points and errors are [candidates, rows, tiles].
    """
    if _fused(weight, scheme):
        from quantkit.methods.kernels import round_tiles

        return round_tiles.errors(weight, scale, zero_point, importance, scheme)
    changes = _changes(weight, scale, zero_point, scheme)
    return torch.stack(
        [grid.tiles(moved.square_().mul_(importance), scheme).sum(-1) for moved in changes]
    )


def tile_errors(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    grams: torch.Tensor,
    scheme: WeightScheme,
) -> torch.Tensor:
    """Output error caused by the change of every tile, by `tile_grams`; for every candidate."""
    size = grams.shape[-1]
    if _fused(weight, scheme) and scheme.strategy == "group" and size in (16, 32, 64, 128):
        from quantkit.methods.kernels import round_tiles

        return round_tiles.errors(weight, scale, zero_point, grams.bfloat16(), scheme)
    changes = (
        grid.tiles(moved, scheme).transpose(0, 1)
        for moved in _changes(weight, scale, zero_point, scheme)
    )
    return torch.stack([products.tile_energies(moved, grams).t() for moved in changes])


def _changes(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: WeightScheme,
) -> Iterator[torch.Tensor]:
    for i, one in enumerate(scale):
        yield change(weight, one, None if zero_point is None else zero_point[i], scheme)


def smoothed_change(
    weight: torch.Tensor, smoothing: torch.Tensor, scheme: WeightScheme
) -> torch.Tensor:
    """The change when columns are multiplied by `smoothing`, rounded, and divided by it again."""
    if _fused(weight, scheme) and scheme.strategy == "group":
        from quantkit.methods.kernels import round_tiles

        return round_tiles.smoothed_change(weight, smoothing, scheme)
    smoothed = weight * smoothing
    view = grid.tiles(smoothed, scheme)
    scale, zero = grid.parameters(view.amin(-1), view.amax(-1), scheme)
    rounded = grid.dequantize(grid.quantize(smoothed, scale, zero, scheme), scheme)
    return rounded.div_(smoothing).sub_(weight)


def _fused(weight: torch.Tensor, scheme: WeightScheme) -> bool:
    return (
        weight.device.type == "cuda"
        and scheme.type == "int"
        and scheme.strategy in ("group", "channel")
        and weight.shape[1] % 32 == 0
    )
