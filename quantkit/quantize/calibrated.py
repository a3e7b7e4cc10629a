"""What a calibrated method does to the linears of one block, given statistics of their inputs.

First smoothing: input channels are scaled and the inverse is folded into what feeds them, which
leaves the block's function as it was. Then rounding. Everything is arithmetic on the block's own
tensors; statistics of scaled inputs follow from those of the source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quantkit import grid
from quantkit.quantize.feeders import Feeder
from quantkit.quantize.methods import awq, gptq, smoothquant
from quantkit.quantize.statistics import Statistics
from quantkit.recipe import Recipe
from quantkit.registry import METHODS

CLIP_RATIOS = tuple(1 - 0.05 * step for step in range(1, 10))
FP8_MAX = 448.0
INT8_MAX = 127.0


@dataclass
class LinearResult:
    """One layer's numbers, and how well they stand for its weight."""

    quantized: grid.QuantizedWeight
    in_scale: torch.Tensor | None
    """The stored weight is that of the source times this, column by column ..."""
    out_scale: torch.Tensor | None
    """... and over this, row by row."""
    input_scale: torch.Tensor | None
    """Of static activations."""
    output_error: float
    """Squared error of the layer's output on calibration data, over that output's square."""
    damping: float | None = None
    fallback: bool = False


@dataclass
class BlockResult:
    """What a recipe made of one block."""

    linears: dict[str, LinearResult] = field(default_factory=dict)
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that took up folded scales, in the type they are stored in."""
    folded: dict[str, torch.Tensor] = field(default_factory=dict)
    """By what each of them was divided."""
    kv_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the cache: `<attention>.k_scale` and `.v_scale`."""


def quantize_block(
    state: Mapping[str, torch.Tensor],
    stored_dtypes: Mapping[str, torch.dtype],
    groups: Mapping[str, list[str]],
    statistics: Mapping[str, Statistics],
    feeders: Mapping[str, Feeder],
    recipe: Recipe,
) -> BlockResult:
    """Smooth and round all linears of a block."""
    work = _Work(state, stored_dtypes, groups, statistics, feeders, recipe)
    if METHODS[recipe.method].smoothing is not None:
        work.smooth()
    work.round()
    return work.result


class _Work:
    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        stored_dtypes: Mapping[str, torch.dtype],
        groups: Mapping[str, list[str]],
        statistics: Mapping[str, Statistics],
        feeders: Mapping[str, Feeder],
        recipe: Recipe,
    ) -> None:
        self.recipe = recipe
        self.scheme = recipe.weights
        self.entry = METHODS[recipe.method]
        self.groups = groups
        self.statistics = dict(statistics)
        self.feeders = feeders
        self.dtypes = stored_dtypes
        self.state = state
        self.weights = {
            name: state[f"{name}.weight"].float() for members in groups.values() for name in members
        }
        self.in_scale: dict[str, torch.Tensor] = {}
        self.out_scale: dict[str, torch.Tensor] = {}
        self.result = BlockResult()

    def smooth(self) -> None:
        # Linear feeders first: they change weights that the groups behind norms contain.
        for wants_norm in (False, True):
            for leader, members in self.groups.items():
                feeder = self.feeders.get(leader)
                if feeder is not None and feeder.is_norm == wants_norm:
                    self._smooth_group(leader, members, feeder)

    def _smooth_group(self, leader: str, members: list[str], feeder: Feeder) -> None:
        statistics = self.statistics[leader]
        stacked = torch.cat([self.weights[name] for name in members])
        if self.entry.smoothing == "smoothquant":
            scale = self._smoothquant(stacked, statistics, feeder)
        else:
            relative = grid.tiles(stacked, self.scheme).abs()
            relative = relative / relative.amax(-1, keepdim=True).clamp(min=1e-30)
            tries = awq.candidates(
                feeder.spread(feeder.shared(statistics.mean_abs)),
                feeder.spread(feeder.shared(relative.reshape(stacked.shape).mean(0))),
            )
            scale, _ = awq.search(stacked, statistics.gram, tries, self._rounded)
        scale = self._fold(feeder, scale)
        for name in members:
            self.weights[name] = self.weights[name] * scale
            self.in_scale[name] = scale
        self.statistics[leader] = statistics.scaled(scale)

    def _smoothquant(
        self, weight: torch.Tensor, statistics: Statistics, feeder: Feeder
    ) -> torch.Tensor:
        fixed = self.recipe.options.get("strength")
        tries = [torch.ones_like(statistics.max_abs)] + [
            smoothquant.scales(
                feeder.spread(feeder.shared(statistics.max_abs)),
                feeder.spread(feeder.shared(weight.abs().amax(0))),
                strength,
            )
            for strength in (smoothquant.STRENGTHS if fixed is None else (float(fixed),))
        ]
        if fixed is not None:
            return tries[1]

        def predicted(scale: torch.Tensor) -> torch.Tensor:
            scaled = weight * scale
            change = self._rounded(scaled) / scale - weight
            inputs = smoothquant.activation_error(statistics.scaled(scale), scaled, INT8_MAX)
            return awq.output_error(change, statistics.gram) + inputs

        errors = torch.stack([predicted(scale) for scale in tries])
        return tries[int(errors.argmin())]

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight after plain rounding: what the search judges scales by."""
        view = grid.tiles(weight, self.scheme)
        scale, zero = grid.parameters(view.amin(-1), view.amax(-1), self.scheme)
        return grid.dequantize(grid.quantize(weight, scale, zero, self.scheme), self.scheme)

    def _fold(self, feeder: Feeder, scale: torch.Tensor) -> torch.Tensor:
        """Divide the feeder by the scale; returns the scale that this really amounts to."""
        own = feeder.shared(scale)
        if not feeder.is_norm:
            self.weights[feeder.name] = self.weights[feeder.name] / own[:, None]
            self.out_scale[feeder.name] = own
            self._divide(f"{feeder.name}.bias", own)
            return scale
        # Round what is stored first, then derive the scale from it: a norm in bf16 is coarse.
        name = f"{feeder.name}.weight"
        before = self.state[name].float() + feeder.offset
        stored = (before / own - feeder.offset).to(self.dtypes[name])
        after = stored.float() + feeder.offset
        usable = (before != 0) & (after != 0)
        own = torch.where(usable, before / torch.where(usable, after, 1.0), 1.0)
        stored = torch.where(usable, stored, self.state[name].to(stored.dtype))
        self.result.changed[name] = stored
        self.result.folded[name] = own
        self._divide(f"{feeder.name}.bias", own)
        return own

    def _divide(self, name: str, scale: torch.Tensor) -> None:
        if name in self.state:
            divided = self.state[name].float() / scale
            self.result.changed[name] = divided.to(self.dtypes[name])
            self.result.folded[name] = scale

    def round(self) -> None:
        for leader, members in self.groups.items():
            statistics = self.statistics[leader]
            by_dtype: dict[torch.dtype, list[str]] = {}
            for name in members:
                by_dtype.setdefault(self.dtypes[f"{name}.weight"], []).append(name)
            factor = gptq.factor(statistics.gram) if self.entry.rounding == "gptq" else None
            for dtype, names in by_dtype.items():
                self._round_stacked(names, dtype, statistics, factor)

    def _round_stacked(
        self,
        names: list[str],
        dtype: torch.dtype,
        statistics: Statistics,
        factor: gptq.Factor | None,
    ) -> None:
        """Rows are independent of each other, so linears that share an input are solved as one.

        With one scale a tensor they also share that scale: vLLM fuses them, and would otherwise
        round all but one of them a second time.
        """
        stacked = torch.cat([self.weights[name] for name in names])
        solved = self._solve(stacked, dtype, statistics, factor)
        start = 0
        for name in names:
            rows = slice(start, start := start + self.weights[name].shape[0])
            own = slice(None) if self.scheme.strategy == "tensor" else rows
            if self.scheme.block_structure is not None:  # one row of scales for many of weights
                high = self.scheme.block_structure[0]
                own = slice(rows.start // high, rows.stop // high)
            zero = None if solved.zero_point is None else solved.zero_point[own]
            part = grid.QuantizedWeight(solved.values[rows], solved.scale[own], zero)
            self._finish(name, part, dtype, statistics, factor)

    def _solve(
        self,
        weight: torch.Tensor,
        dtype: torch.dtype,
        statistics: Statistics,
        factor: gptq.Factor | None,
    ) -> grid.QuantizedWeight:
        scale, zero = self._parameters(weight, dtype, statistics)
        if factor is not None:
            return gptq.solve(weight, factor, scale, zero, self.scheme)
        return grid.quantize(weight, scale, zero, self.scheme)

    def _finish(
        self,
        name: str,
        quantized: grid.QuantizedWeight,
        dtype: torch.dtype,
        statistics: Statistics,
        factor: gptq.Factor | None,
    ) -> None:
        weight = self.weights[name]
        change = grid.dequantize(quantized, self.scheme) - weight
        whole = awq.output_error(weight, statistics.gram).clamp(min=1e-30)
        self.result.linears[name] = LinearResult(
            quantized,
            self.in_scale.get(name),
            self.out_scale.get(name),
            self._input_scale(statistics, dtype),
            (awq.output_error(change, statistics.gram) / whole).item(),
            None if factor is None else factor.damping,
            fallback=self.entry.rounding == "gptq" and factor is None,
        )

    def _parameters(
        self, weight: torch.Tensor, dtype: torch.dtype, statistics: Statistics
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.entry.rounding == "rtn":
            view = grid.tiles(weight, self.scheme)
            return grid.parameters(view.amin(-1).to(dtype), view.amax(-1).to(dtype), self.scheme)
        return grid.search_parameters(
            weight, self.scheme, dtype, self._tile_error(weight, statistics), CLIP_RATIOS
        )

    def _tile_error(self, weight: torch.Tensor, statistics: Statistics) -> Any:
        columns = weight.shape[1]
        size = grid.tiles(weight[:1], self.scheme).shape[-1]
        if self.entry.rounding == "gptq":
            importance = statistics.gram.diagonal().view(columns // size, size)
            return lambda change: (change.square() * importance).sum(-1)
        n_tiles = columns // size
        blocks = statistics.gram.view(n_tiles, size, n_tiles, size)
        grams = torch.stack([blocks[i, :, i, :] for i in range(n_tiles)])

        def error(change: torch.Tensor) -> torch.Tensor:
            by_tile = change.transpose(0, 1)
            return ((by_tile @ grams) * by_tile).sum(-1).t()

        return error

    def _input_scale(self, statistics: Statistics, dtype: torch.dtype) -> torch.Tensor | None:
        activations = self.recipe.input_activations
        if activations is None or activations.dynamic:
            return None
        largest = statistics.max_abs.max().clamp(min=1e-12)
        top = FP8_MAX if activations.type == "float" else INT8_MAX
        return (largest / top).to(dtype).reshape(1)
