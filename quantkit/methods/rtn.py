"""Round to nearest: the smallest complete method, and the baseline for all others.

A scale is the largest magnitude it must cover over the largest number of the grid; each weight
becomes the nearest grid point. Scales and integers equal those of compressed-tensors' own parameter
calculation, bit for bit, with the division done in float32: in bf16 it would lose up to half a step
at 8 bits.
"""

from quantkit.methods.contract import Cost, Linears, Method, Rounded


class Nearest:
    """Scales from the range of the weights, then rounding."""

    statistics = ()

    def cost(self, rows: int, columns: int) -> Cost:
        return Cost()  # a few operations per weight

    def round(self, linears: Linears) -> Rounded:
        from quantkit import grid
        from quantkit.methods import scales
        from quantkit.numbers import channel_scales

        scheme, whole = linears.scheme, scales.global_scale(linears)
        if linears.largest is not None and scheme.strategy == "tensor":
            low, high = -linears.largest.reshape(1), linears.largest.reshape(1)
        else:
            tiles = grid.tiles(linears.weight, scheme)
            # Not aminmax: along a dimension it is several times slower on a CPU.
            low, high = tiles.amin(-1), tiles.amax(-1)
        low, high = low.to(linears.dtype), high.to(linears.dtype)
        scale, zero = grid.parameters(low, high, scheme, linears.scale_dtype, whole)
        if channel_scales.apply_to(scheme, linears.activations):
            scale = channel_scales.near(scale, linears.dtype)[0]
        return Rounded(grid.quantize(linears.weight, scale, zero, scheme, whole))


RTN = Method(
    "round to nearest",
    "Every weight is rounded to the nearest number that the format has.",
    Nearest(),
    modifiers=("QuantizationModifier",),
)
