"""One recipe at one block: applies its method to every group of linears, given statistics.

Smoothing comes first: input channels are scaled and the inverse is folded into what feeds them,
which leaves the block's function unchanged. Then rounding. Everything is arithmetic on the block's
own tensors; statistics of scaled inputs follow from those of the source.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quantkit import formats, grid, methods, numbers
from quantkit.methods import products
from quantkit.methods.contract import BatchRounding, Cost, Linears, Rounded, Smoothing
from quantkit.methods.products import Halves
from quantkit.methods.statistics import Statistics
from quantkit.model.architecture import EXPERT
from quantkit.onepass.feeders import Feeder
from quantkit.onepass.ranks import Job, Ranks
from quantkit.onepass.result import BlockResult, LinearResult
from quantkit.plan import checkpoint as planning
from quantkit.recipe import Recipe

MIXTURE_ROWS = 8192
"""Rows, over all experts together, that are used to choose their shared scales."""

BATCHED = ("cuda",)
"""Devices on which experts are rounded as a batch; a CPU gains nothing, and needs the memory."""
BATCH_BYTES = 4 << 30
"""For what a batch needs besides its statistics."""

Replay = Callable[[dict[str, torch.Tensor]], torch.Tensor]
"""The squared error of the block's output on some samples, with these weights in place."""


def solve(works: Sequence["Work"], ranks: Ranks) -> None:
    """Smooth and round all linears of a block for every recipe.

    Jobs of one stage do not depend on each other, so ranks can share them.
    """
    for behind_norms in (False, True):  # linear feeders change weights that norms feed
        ranks.spread([job for work in works for job in work.smoothing(behind_norms)])
    ranks.spread([job for work in works for job in work.rounding()])


def measuring_cost(rows: int, columns: int) -> Cost:
    """Cost of measuring the errors of a method's result."""
    return Cost(8.0 * rows * columns**2)


def batch_size(rows: int, columns: int) -> int:
    """How many inputs' linears, stacked [rows, columns], are rounded as one batch."""
    return max(1, BATCH_BYTES // batch_bytes(rows, columns))


def batch_bytes(rows: int, columns: int) -> int:
    """Bytes for one of them: copies of a Gram matrix and of the weights, in float32."""
    return 4 * (4 * columns * columns + 6 * rows * columns)


@dataclass(frozen=True)
class _Stacked:
    """Linears that read one input: rows are independent of each other, so they form one weight."""

    names: list[str]
    linears: Linears
    largest: torch.Tensor
    """Input magnitude, for static scales."""


class Work:
    """One recipe at one block; `result` is complete once it is solved."""

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        stored_dtypes: Mapping[str, torch.dtype],
        groups: Mapping[str, list[str]],
        statistics: Mapping[str, Statistics],
        feeders: Mapping[str, Feeder],
        recipes: Mapping[str, Recipe],
        replay: Replay | None = None,
    ) -> None:
        """`recipes` holds the recipe that applies to each linear; linears that share an input share
        one.
        """
        self.recipes = recipes
        self.groups = groups
        self.statistics = statistics
        self.feeders = feeders
        self.dtypes = stored_dtypes
        self.state = state
        self.replay = replay
        self.in_scale: dict[str, torch.Tensor] = {}
        self.out_scale: dict[str, torch.Tensor] = {}
        self.result = BlockResult()
        self._shared: dict[str, torch.Tensor] | None = None

    def weight(self, name: str) -> torch.Tensor:
        """A linear's weight with all scales folded so far, in float32."""
        weight = self.state[f"{name}.weight"].float()
        if name in self.out_scale:
            weight = weight / self.out_scale[name][:, None]
        if name in self.in_scale:
            weight = weight * self.in_scale[name]
        return weight

    def _stacked(self, names: list[str]) -> torch.Tensor:
        """All rows; one weight at a time, so that none is in memory twice."""
        if len(names) == 1:
            return self.weight(names[0])
        first = self.state[f"{names[0]}.weight"]
        stacked = first.new_empty(self._shape(names), dtype=torch.float32)
        heights = [self.state[f"{name}.weight"].shape[0] for name in names]
        for name, rows in zip(names, torch.split(stacked, heights), strict=True):
            rows.copy_(self.weight(name))
        return stacked

    def smoothing(self, behind_norms: bool) -> list[Job]:
        """Scale the inputs of every group that a norm or a linear feeds.

        Only where this recipe rewrites everything that a scale touches: a feeding linear that it
        leaves unquantised, or a reader that it does not quantise, would be left with the wrong
        function.
        """
        mine = {name for members in self.groups.values() for name in members}
        jobs = []
        for feeder, leaders in self._fed(behind_norms):
            smoothing = methods.find(self.recipes[self.groups[leaders[0]][0]].method).smoothing
            if smoothing is None:
                continue
            if feeder.readers <= mine and (feeder.is_norm or feeder.name in mine):
                members = [name for leader in leaders for name in self.groups[leader]]
                inputs = feeder.experts or leaders[0]
                cost = smoothing.cost(*self._shape(members))
                scale = partial(self._scale, smoothing, inputs, members, feeder)
                take = partial(self._take_scale, members, feeder)
                jobs.append(Job(cost.fast + cost.slow, scale, take))
        return jobs

    def _fed(self, by_norms: bool) -> list[tuple[Feeder, list[str]]]:
        """What feeds groups, and all groups that it feeds: they share one scale."""
        found: dict[str, tuple[Feeder, list[str]]] = {}
        for leader in self.groups:
            feeder = self.feeders.get(leader)
            if feeder is not None and feeder.is_norm == by_norms:
                found.setdefault(feeder.name, (feeder, []))[1].append(leader)
        return list(found.values())

    def _shape(self, members: list[str]) -> tuple[int, int]:
        """Shape of the weights of a group, stacked."""
        shapes = [self.state[f"{name}.weight"].shape for name in members]
        return sum(shape[0] for shape in shapes), shapes[0][1]

    def _scale(
        self, smoothing: Smoothing, leader: str, members: list[str], feeder: Feeder
    ) -> torch.Tensor:
        # Before o_proj and down_proj the Gram error is the block's own: only a sum follows.
        replay = partial(self._replayed, members) if self.replay and feeder.is_norm else None
        linears = self._linears(
            members, self.dtypes[f"{members[0]}.weight"], self.statistics[leader]
        )
        if feeder.experts:  # rows of every expert choose for all
            replay = None
            n_rows = max(1, MIXTURE_ROWS // len(members))
            rows = torch.cat([_spread_rows(self.weight(name), n_rows) for name in members])
            linears = replace(linears, weight=rows)
        linears = replace(
            linears,
            foldable=lambda values: feeder.spread(feeder.shared(values)),
            replay=replay,
        )
        scale = smoothing.scale(linears)
        # So that what is never quantised stays exact in its own dtype.
        return torch.exp2(scale.log2().round()) if feeder.others else scale

    def _take_scale(self, members: list[str], feeder: Feeder, scale: torch.Tensor) -> None:
        scale = self._fold(feeder, scale)
        for name in feeder.others:
            self._divide(f"{name}.weight", 1 / scale)
        for name in members:
            self.in_scale[name] = scale

    def _replayed(self, members: list[str], weight: torch.Tensor) -> torch.Tensor:
        """The squared error of the block's output with these linears, stacked, replaced."""
        assert self.replay is not None
        parts = torch.split(weight, [self.state[f"{n}.weight"].shape[0] for n in members])
        return self.replay(
            {
                f"{name}.weight": grid.unfold(part, None, self.out_scale.get(name))
                for name, part in zip(members, parts, strict=True)
            }
        )

    def _fold(self, feeder: Feeder, scale: torch.Tensor) -> torch.Tensor:
        """Divide the feeder by the scale; returns the scale that results after rounding."""
        own = feeder.shared(scale)
        if not feeder.is_norm:
            self.out_scale[feeder.name] = own
            self._divide(f"{feeder.name}.bias", own)
            return scale
        # Round the stored value first, then derive the scale from it: a norm in bf16 is coarse.
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
        """Quantise every linear; experts of one shape as a batch."""
        self._shared = {}
        jobs = []
        for leaders in self._batches():
            members = self.groups[leaders[0]]
            shape = self._shape(members)
            method = methods.find(self.recipes[members[0]].method)
            cost = method.rounding.cost(*shape) + measuring_cost(*shape)
            do = partial(self._rounded, leaders)
            take = self.result.linears.update
            jobs.append(Job(len(leaders) * (cost.fast + cost.slow), do, take))
        return jobs

    def _batches(self) -> list[list[str]]:
        """Groups that are rounded together, by their leaders; most are alone."""
        alike: dict[Hashable, list[list[str]]] = {}
        for leader, members in self.groups.items():
            recipe = self.recipes[members[0]]
            weights = [self.state[f"{name}.weight"] for name in members]
            rounding = methods.find(recipe.method).rounding
            if (
                weights[0].device.type not in BATCHED
                or not EXPERT.search(leader)
                or not isinstance(rounding, BatchRounding)
            ):
                alike[leader] = [[leader]]
                continue
            dtypes = tuple(self.dtypes[f"{name}.weight"] for name in members)
            shapes = tuple(tuple(weight.shape) for weight in weights)
            kind = recipe.method, recipe.weights, repr(recipe.options)
            made = alike.setdefault((shapes, dtypes, *kind), [[]])
            if len(made[-1]) == batch_size(*self._shape(members)):
                made.append([])
            made[-1].append(leader)
        return [leaders for made in alike.values() for leaders in made]

    def _rounded(self, leaders: list[str]) -> dict[str, LinearResult]:
        """The linears of some groups; more than one only where their method supports batches."""
        parts: dict[torch.dtype, list[_Stacked]] = {}
        for leader in leaders:
            members, statistics = self.groups[leader], self.statistics[leader]
            if members[0] in self.in_scale:
                statistics = statistics.scaled(self.in_scale[members[0]])
            largest = self._largest_input(leader, statistics)
            by_dtype: dict[torch.dtype, list[str]] = {}
            for name in members:
                by_dtype.setdefault(self.dtypes[f"{name}.weight"], []).append(name)
            for dtype, names in by_dtype.items():
                linears = self._linears(names, dtype, statistics)
                parts.setdefault(dtype, []).append(_Stacked(names, linears, largest))
        results: dict[str, LinearResult] = {}
        for stacked in parts.values():
            rounding = methods.find(self.recipes[stacked[0].names[0]].method).rounding
            if len(leaders) > 1 and isinstance(rounding, BatchRounding):
                made = rounding.round_batch([one.linears for one in stacked])
            else:
                made = [rounding.round(one.linears) for one in stacked]
            for one, rounded in zip(stacked, made, strict=True):
                results |= self._measured(one, rounded)
        return results

    def _largest_input(self, leader: str, statistics: Statistics) -> torch.Tensor:
        """Largest input of a group; for experts of the whole block, since engines merge their
        scales.
        """
        found = EXPERT.search(leader)
        activations = self.recipes[self.groups[leader][0]].input_activations
        if found is None or activations is None or not activations.is_static:
            return statistics.max_abs.max()
        start, last = leader[: found.start()], leader[found.end() :]
        largest = []
        for other, members in self.groups.items():
            match = EXPERT.search(other)
            if match is None or (other[: match.start()], other[match.end() :]) != (start, last):
                continue
            scale = self.in_scale.get(members[0])
            seen = self.statistics[other].max_abs
            largest.append((seen if scale is None else seen / scale).max())
        return torch.stack(largest).max()

    def _measured(self, one: "_Stacked", rounded: Rounded) -> dict[str, LinearResult]:
        """The rounding result of linears that share an input, with the errors of each.

        With per-tensor scales they also share that scale: vLLM fuses them, and would otherwise
        round all but one of them a second time.
        """
        names, linears = one.names, one.linears
        scheme, stacked, solved = linears.scheme, linears.weight, rounded.quantized
        change = grid.dequantize(solved, scheme).sub_(stacked)
        gram = Halves.of(linears.inputs.gram)
        errors = rounded.errors
        if errors is None:
            errors = products.row_energies(change, gram)
        whole = products.row_energies(stacked, gram, exactly=False)
        start = 0
        results = {}
        for place, name in enumerate(names):
            rows = slice(start, start := start + self.state[f"{name}.weight"].shape[0])
            own = slice(None) if scheme.strategy == "tensor" else rows
            if scheme.block_structure is not None:  # one row of scales covers many rows of weights
                high = scheme.block_structure[0]
                own = slice(rows.start // high, rows.stop // high)
            zero = None if solved.zero_point is None else solved.zero_point[own]
            in_scale, out_scale = self.in_scale.get(name), self.out_scale.get(name)
            undone = grid.unfold(change[rows], in_scale, out_scale)
            original = torch.linalg.vector_norm(self.state[f"{name}.weight"], dtype=torch.float32)
            results[name] = LinearResult(
                grid.QuantizedWeight(
                    solved.values[rows], solved.scale[own], zero, solved.global_scale
                ),
                in_scale,
                out_scale,
                self._input_scale(name, one.largest, linears.dtype),
                torch.linalg.vector_norm(undone) / original.clamp(min=1e-30),
                errors[rows].sum() / whole[rows].sum().clamp(min=1e-30),
                rounded.damping,
                rounded.fallback,
                {way: found[place] for way, found in (rounded.held_out or {}).items()} or None,
            )
        return results

    def remeasured(self, name: str, linear: LinearResult) -> LinearResult:
        """A linear whose numbers changed, with its new errors."""
        leader = next(first for first, members in self.groups.items() if name in members)
        statistics = self.statistics[leader]
        if name in self.in_scale:
            statistics = statistics.scaled(self.in_scale[name])
        weight, gram = self.weight(name), Halves.of(statistics.gram)
        change = grid.dequantize(linear.quantized, self.recipes[name].weights).sub_(weight)
        whole = products.row_energies(weight, gram, exactly=False).sum()
        original = torch.linalg.vector_norm(self.state[f"{name}.weight"], dtype=torch.float32)
        undone = grid.unfold(change, linear.in_scale, linear.out_scale)
        return replace(
            linear,
            relative_error=torch.linalg.vector_norm(undone) / original.clamp(min=1e-30),
            output_error=products.row_energies(change, gram).sum() / whole.clamp(min=1e-30),
        )

    def _linears(self, names: list[str], dtype: torch.dtype, statistics: Statistics) -> Linears:
        """Linears that read one input, as their method sees them."""
        recipe = self.recipes[names[0]]
        largest = None
        if numbers.of(recipe.weights).has_global_scale:
            largest = self._largest_weight(names[0]).to(dtype)
        return Linears(
            self._stacked(names),
            dtype,
            recipe.weights,
            recipe.options,
            statistics,
            formats.scale_dtype(recipe),
            largest=largest,
            activations=recipe.input_activations,
            heights=tuple(self.state[f"{name}.weight"].shape[0] for name in names),
            is_expert=EXPERT.search(names[0]) is not None,
        )

    def _largest_weight(self, name: str) -> torch.Tensor:
        """Largest weight of the layers that share a global scale, computed once when scales are
        final.
        """
        sharing = planning.sharing(name, self.recipes)
        if self._shared is not None and sharing[0] in self._shared:
            return self._shared[sharing[0]]
        largest = torch.stack([self.weight(other).abs().amax() for other in sharing]).amax()
        if self._shared is not None:
            self._shared[sharing[0]] = largest
        return largest

    def _input_scale(
        self, name: str, largest: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        activations = self.recipes[name].input_activations
        if activations is None or not activations.is_static:
            return None
        largest = largest.clamp(min=1e-12)
        number = numbers.of(activations)
        if number.has_global_scale:
            return number.global_scale(largest.to(dtype))
        return number.activation_scale(largest).to(dtype).reshape(1)


def _spread_rows(weight: torch.Tensor, n_rows: int) -> torch.Tensor:
    """At most this many rows, evenly spaced."""
    return weight[:: -(-weight.shape[0] // n_rows)]
