"""What a calibrated method does to the linears of one block, given statistics of their inputs.

First smoothing: input channels are scaled and the inverse is folded into what feeds them, which
leaves the block's function as it was. Then rounding. Everything is arithmetic on the block's own
tensors; statistics of scaled inputs follow from those of the source.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from quantkit import grid
from quantkit.export import layers
from quantkit.methods import awq, gptq, products, rounding, smoothquant
from quantkit.methods.products import Halves
from quantkit.methods.statistics import Statistics
from quantkit.onepass.feeders import Feeder
from quantkit.onepass.ranks import Job, Ranks
from quantkit.onepass.result import BlockResult, LinearResult
from quantkit.recipe import Recipe
from quantkit.registry import METHODS

CLIP_RATIOS = tuple(1 - 0.05 * step for step in range(1, 10))
FP8_MAX = 448.0
INT8_MAX = 127.0
JUDGING_ROWS = 2048
"""Rows of a weight that judge scales: rows are alike, so a part of them chooses as well as all."""
REPLAYED = 2
"""Scales before a norm that are tried on the real block, the best by their Gram error."""

Replay = Callable[[dict[str, torch.Tensor]], torch.Tensor]
"""The squared error of the block's output on some samples, with these weights in place."""


def solve(works: Sequence["Work"], ranks: Ranks) -> None:
    """Smooth and round all linears of a block for every recipe.

    Jobs of one stage do not depend on each other, so that ranks can share them.
    """
    for behind_norms in (False, True):  # linear feeders change weights that norms feed
        ranks.spread([job for work in works for job in work.smoothing(behind_norms)])
    ranks.spread([job for work in works for job in work.rounding()])


class Work:
    """One recipe at one block; `result` is complete once it is solved."""

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        stored_dtypes: Mapping[str, torch.dtype],
        groups: Mapping[str, list[str]],
        statistics: Mapping[str, Statistics],
        feeders: Mapping[str, Feeder],
        recipe: Recipe,
        replay: Replay | None = None,
    ) -> None:
        self.recipe = recipe
        self.scheme = recipe.weights
        self.stored = layers.scale_dtype(recipe)
        self.entry = METHODS[recipe.method]
        self.groups = groups
        self.statistics = statistics
        self.feeders = feeders
        self.dtypes = stored_dtypes
        self.state = state
        self.replay = replay
        self.in_scale: dict[str, torch.Tensor] = {}
        self.out_scale: dict[str, torch.Tensor] = {}
        self.result = BlockResult()

    def weight(self, name: str) -> torch.Tensor:
        """A linear's weight with the scales that were folded so far, in float32."""
        weight = self.state[f"{name}.weight"].float()
        if name in self.out_scale:
            weight = weight / self.out_scale[name][:, None]
        if name in self.in_scale:
            weight = weight * self.in_scale[name]
        return weight

    def _stacked(self, names: list[str]) -> torch.Tensor:
        return torch.cat([self.weight(name) for name in names])

    def smoothing(self, behind_norms: bool) -> list[Job]:
        """Scale the inputs of every group that a norm feeds, or a linear.

        Only where this recipe rewrites all that a scale touches: a feeding linear that it leaves
        alone, or a reader that it does not quantise, would be left with the wrong function.
        """
        if self.entry.smoothing is None:
            return []
        mine = {name for members in self.groups.values() for name in members}
        jobs = []
        for leader, members in self.groups.items():
            feeder = self.feeders.get(leader)
            if feeder is None or feeder.is_norm != behind_norms:
                continue
            if feeder.readers <= mine and (feeder.is_norm or feeder.name in mine):
                rows, columns = self._shape(members)
                jobs.append(
                    Job(
                        float(min(rows, JUDGING_ROWS) * columns**2),
                        partial(self._smoothed, leader, members, feeder),
                        partial(self._take_scale, members, feeder),
                    )
                )
        return jobs

    def _shape(self, members: list[str]) -> tuple[int, int]:
        """Of the weights of a group, stacked."""
        shapes = [self.state[f"{name}.weight"].shape for name in members]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _smoothed(self, leader: str, members: list[str], feeder: Feeder) -> torch.Tensor:
        statistics = self.statistics[leader]
        stacked = self._stacked(members)
        if self.entry.smoothing == "smoothquant":
            return self._smoothquant(stacked, statistics, feeder)
        return self._awq(members, stacked, statistics, feeder)

    def _take_scale(self, members: list[str], feeder: Feeder, scale: torch.Tensor) -> None:
        scale = self._fold(feeder, scale)
        for name in members:
            self.in_scale[name] = scale

    def _awq(
        self, members: list[str], stacked: torch.Tensor, statistics: Statistics, feeder: Feeder
    ) -> torch.Tensor:
        relative = grid.tiles(stacked, self.scheme).abs()
        relative /= relative.amax(-1, keepdim=True).clamp(min=1e-30)
        tries = awq.candidates(
            feeder.spread(feeder.shared(statistics.mean_abs)),
            feeder.spread(feeder.shared(relative.reshape(stacked.shape).mean(0))),
        )
        judges = _some_rows(stacked)
        errors = awq.errors(
            tries,
            Halves.of(statistics.gram),
            lambda scale: rounding.smoothed_change(judges, scale, self.scheme),
        )
        # Before o_proj and down_proj the Gram error is the block's own: only a sum comes after.
        if self.replay is None or not feeder.is_norm:
            return tries[int(errors.argmin())]
        best = [tries[i] for i in errors.argsort()[:REPLAYED].tolist()]
        replayed = torch.stack([self._replayed(members, stacked, scale) for scale in best])
        return best[int(replayed.argmin())]

    def _replayed(
        self, members: list[str], stacked: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        assert self.replay is not None
        rounded = rounding.smoothed_change(stacked, scale, self.scheme).add_(stacked)
        parts = torch.split(rounded, [self.state[f"{n}.weight"].shape[0] for n in members])
        return self.replay(
            {
                f"{name}.weight": grid.unfold(part, None, self.out_scale.get(name))
                for name, part in zip(members, parts, strict=True)
            }
        )

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
        judges = _some_rows(weight)
        rounded = awq.errors(
            tries,
            Halves.of(statistics.gram),
            lambda scale: rounding.smoothed_change(judges, scale, self.scheme),
        )
        inputs = torch.stack(
            [smoothquant.activation_error(statistics, judges, scale, INT8_MAX) for scale in tries]
        )
        return tries[int((rounded + inputs).argmin())]

    def _fold(self, feeder: Feeder, scale: torch.Tensor) -> torch.Tensor:
        """Divide the feeder by the scale; returns the scale that this really amounts to."""
        own = feeder.shared(scale)
        if not feeder.is_norm:
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

    def rounding(self) -> list[Job]:
        """Choose the numbers of every linear."""
        jobs = []
        for leader, members in self.groups.items():
            rows, columns = self._shape(members)
            cost = float(rows * columns**2)
            if self.entry.rounding == "gptq":  # rows in float32, and a matrix to factor
                cost = 4 * cost + 2 * float(columns**3)
            do = partial(self._rounded, leader, members)
            jobs.append(Job(cost, do, self.result.linears.update))
        return jobs

    def _rounded(self, leader: str, members: list[str]) -> dict[str, LinearResult]:
        statistics = self.statistics[leader]
        if members[0] in self.in_scale:
            statistics = statistics.scaled(self.in_scale[members[0]])
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in members:
            by_dtype.setdefault(self.dtypes[f"{name}.weight"], []).append(name)
        factor = gptq.factor(statistics.gram) if self.entry.rounding == "gptq" else None
        results: dict[str, LinearResult] = {}
        for dtype, names in by_dtype.items():
            results |= self._round_stacked(names, dtype, statistics, factor)
        return results

    def _round_stacked(
        self,
        names: list[str],
        dtype: torch.dtype,
        statistics: Statistics,
        factor: gptq.Factor | None,
    ) -> dict[str, LinearResult]:
        """Rows are independent of each other, so linears that share an input are solved as one.

        With one scale a tensor they also share that scale: vLLM fuses them, and would otherwise
        round all but one of them a second time.
        """
        stacked = self._stacked(names)
        scale, zero = self._parameters(stacked, dtype, statistics)
        if factor is not None:
            solved = gptq.solve(stacked, factor, scale, zero, self.scheme)
        else:
            solved = grid.quantize(stacked, scale, zero, self.scheme)
        change = grid.dequantize(solved, self.scheme).sub_(stacked)
        gram = Halves.of(statistics.gram)
        errors = products.row_energies(change, gram)
        whole = products.row_energies(stacked, gram, exactly=False)
        start = 0
        results = {}
        for name in names:
            rows = slice(start, start := start + self.state[f"{name}.weight"].shape[0])
            own = slice(None) if self.scheme.strategy == "tensor" else rows
            if self.scheme.block_structure is not None:  # one row of scales for many of weights
                high = self.scheme.block_structure[0]
                own = slice(rows.start // high, rows.stop // high)
            zero = None if solved.zero_point is None else solved.zero_point[own]
            in_scale, out_scale = self.in_scale.get(name), self.out_scale.get(name)
            undone = grid.unfold(change[rows], in_scale, out_scale)
            original = torch.linalg.vector_norm(self.state[f"{name}.weight"], dtype=torch.float32)
            results[name] = LinearResult(
                grid.QuantizedWeight(solved.values[rows], solved.scale[own], zero),
                in_scale,
                out_scale,
                self._input_scale(statistics, dtype),
                torch.linalg.vector_norm(undone) / original.clamp(min=1e-30),
                errors[rows].sum() / whole[rows].sum().clamp(min=1e-30),
                None if factor is None else factor.damping,
                fallback=self.entry.rounding == "gptq" and factor is None,
            )
        return results

    def _parameters(
        self, weight: torch.Tensor, dtype: torch.dtype, statistics: Statistics
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.entry.rounding == "rtn":
            view = grid.tiles(weight, self.scheme)
            low, high = view.amin(-1).to(dtype), view.amax(-1).to(dtype)
            return grid.parameters(low, high, self.scheme, self.stored)
        error = (
            self._error_by_importance(weight, statistics)
            if self.entry.rounding == "gptq"
            else self._error_by_tile(weight, statistics)
        )
        return grid.search_parameters(weight, self.scheme, dtype, error, CLIP_RATIOS, self.stored)

    def _error_by_importance(
        self, weight: torch.Tensor, statistics: Statistics
    ) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        importance = statistics.gram.diagonal().contiguous()
        return lambda scale, zero: rounding.weighted_error(
            weight, scale, zero, importance, self.scheme
        )

    def _error_by_tile(
        self, weight: torch.Tensor, statistics: Statistics
    ) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        size = grid.tiles(weight[:1], self.scheme).shape[-1]
        n_tiles = weight.shape[1] // size
        blocks = statistics.gram.view(n_tiles, size, n_tiles, size)
        grams = torch.stack([blocks[i, :, i, :] for i in range(n_tiles)])

        def error(scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
            moved = grid.tiles(rounding.change(weight, scale, zero, self.scheme), self.scheme)
            return products.tile_energies(moved.transpose(0, 1), grams).t()

        return error

    def _input_scale(self, statistics: Statistics, dtype: torch.dtype) -> torch.Tensor | None:
        activations = self.recipe.input_activations
        if activations is None or activations.dynamic:
            return None
        largest = statistics.max_abs.max().clamp(min=1e-12)
        top = FP8_MAX if activations.type == "float" else INT8_MAX
        return (largest / top).to(dtype).reshape(1)


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    step = -(-weight.shape[0] // JUDGING_ROWS)
    return weight[::step].contiguous()
