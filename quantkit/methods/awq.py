"""AWQ: scale important input channels up before rounding, and the layer that feeds them down.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
https://arxiv.org/abs/2306.00978

Scaling channel i of the input by 1/s_i and column i of the weight by s_i changes nothing but the
rounding. The scales come from a grid over exponents of the mean input magnitude, with and without
the weight's own magnitude. Difference from the reference code: with G the Gram matrix of the inputs
and D the change of the weight, tr(D G D^T) is exactly the squared error of the layer's output, so
the search needs no forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.methods.contract import PROPAGATE, Cost, Linears, Method, Rounded
from quantkit.methods.gptq import DISTIL, SCALES, SIGNED, SWEEPS, TUNE, ColumnByColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from quantkit.methods.products import Halves

EXPONENTS = 20
JUDGING_ROWS = 2048
"""Rows of a weight used to compare scales: rows are alike, so a sample chooses as well as all."""
REPLAYED = 2
"""How many scales before a norm, the best by Gram error, are tried on the real block."""


class Protecting:
    """Scales of input channels with the least output error."""

    statistics = ("gram", "mean_abs")

    def cost(self, rows: int, columns: int) -> Cost:
        return Cost(2.0 * 2 * EXPONENTS * min(rows, JUDGING_ROWS) * columns**2)

    def scale(self, linears: Linears) -> torch.Tensor:
        import torch

        from quantkit import grid
        from quantkit.methods import rounding

        weight, scheme = linears.weight, linears.scheme
        relative = grid.tiles(weight, scheme).abs()
        relative /= relative.amax(-1, keepdim=True).clamp(min=1e-30)
        tries = candidates(
            linears.foldable(linears.inputs.mean_abs),
            linears.foldable(relative.reshape(weight.shape).mean(0)),
        )
        found = rounding_errors(linears, tries)
        if linears.replay is None:
            return tries[int(found.argmin())].clone()  # else all of them stay in memory
        best = [tries[i] for i in found.argsort()[:REPLAYED].tolist()]
        replayed = [
            linears.replay(rounding.smoothed_change(weight, scale, scheme).add_(weight))
            for scale in best
        ]
        return best[int(torch.stack(replayed).argmin())].clone()


class Clipping:
    """Scales that clip, chosen by the output error of each tile; then rounding to nearest."""

    statistics = ("gram",)

    def cost(self, rows: int, columns: int) -> Cost:
        return Cost()  # Gram matrices of tiles are narrow

    def round(self, linears: Linears) -> Rounded:
        from quantkit import grid
        from quantkit.methods import rounding, scales

        weight, scheme = linears.weight, linears.scheme
        grams = scales.tile_grams(linears.inputs.gram, grid.tiles(weight[:1], scheme).shape[-1])
        found = rounding.clipped(
            linears,
            lambda scale, zero: rounding.tile_errors(weight, scale, zero, grams, scheme),
        )
        return Rounded(grid.quantize(weight, *found, scheme))


AWQ = Method(
    "enlarge important channels before rounding, clip by output error",
    "AWQ enlarges the input channels that matter most before rounding, undoes that in what feeds "
    "them, and clips outliers where the layer's output gains from it.",
    Clipping(),
    Protecting(),
    options={"propagate": PROPAGATE},
    types=("int",),
    modifiers=("AWQModifier", "QuantizationModifier"),
)
AWQ_GPTQ = Method(
    "AWQ's scales, then GPTQ's rounding",
    "AWQ's scales first: input channels that matter are enlarged, which is undone in what feeds "
    "them. Then GPTQ's rounding, column by column, each making up for the last.",
    ColumnByColumn(),
    Protecting(),
    propagates=True,
    options={
        "propagate": PROPAGATE,
        "scales": SCALES,
        "sweeps": SWEEPS,
        "tune": TUNE,
        "distil": DISTIL,
        "signed": SIGNED,
    },
    types=("int",),
    modifiers=("AWQModifier", "GPTQModifier"),
)


def candidates(mean_abs: torch.Tensor, weight_abs: torch.Tensor) -> list[torch.Tensor]:
    """Scales to try; the first leaves the channels unscaled."""
    import torch

    inputs = mean_abs.clamp(min=1e-6 * mean_abs.max().clamp(min=1e-30))
    weights = weight_abs.clamp(min=1e-6 * weight_abs.max().clamp(min=1e-30))
    exponents = [step / EXPONENTS for step in range(1, EXPONENTS)]
    by_inputs = torch.stack([inputs**exponent for exponent in exponents])
    by_both = by_inputs / torch.stack([weights ** (1 - exponent) for exponent in exponents])
    found = torch.stack((by_inputs, by_both), 1).flatten(0, 1)
    found /= (found.amax(1, keepdim=True) * found.amin(1, keepdim=True)).sqrt_()
    return [torch.ones_like(inputs), *found]


def rounding_errors(linears: Linears, tries: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output error of every candidate when its scaled weights are rounded to nearest."""
    from quantkit.methods import rounding
    from quantkit.methods.products import Halves

    judges = judging_rows(linears.weight)
    return errors(
        tries,
        Halves.of(linears.inputs.gram),
        lambda scale: rounding.smoothed_change(judges, scale, linears.scheme),
    )


def errors(
    tries: Sequence[torch.Tensor],
    gram: Halves,
    change_of: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The output error of every candidate; `change_of` returns the rounding change under a
    scale.
    """
    import torch

    from quantkit.methods.products import row_energies

    return torch.stack(
        [row_energies(change_of(scale), gram, exactly=False).sum() for scale in tries]
    )


def judging_rows(weight: torch.Tensor) -> torch.Tensor:
    """Evenly spaced rows, at most `JUDGING_ROWS`."""
    step = -(-weight.shape[0] // JUDGING_ROWS)
    return weight[::step].contiguous()
