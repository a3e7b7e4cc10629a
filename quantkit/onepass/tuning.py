"""A short gradient stage: codes and scales of one block are fitted to the block's own output.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs",
https://arxiv.org/abs/2309.05516

Methods see one layer at a time. Here all layers of a block move together, such that the block,
given the output of the quantised blocks before it, comes closer to the source's output. A code has
a position within its cell, and every step moves all positions by the same amount, down or up by the
sign of the gradient; those that leave their cell change the code. Scales move likewise.

Differences from the paper: positions start in the cells of the codes that the method chose, not at
the rounded weights, so tens of steps are enough; signs are those of a mean over steps; and held-out
tokens decide between before and after. The order of batches is fixed, so a run is reproducible.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from quantkit import grid, numbers
from quantkit.onepass.calibrated import Work
from quantkit.onepass.estimate import samples_per_batch
from quantkit.onepass.hidden_states import HiddenStates
from quantkit.onepass.padding import real
from quantkit.onepass.result import BlockResult
from quantkit.onepass.visit import Visit
from quantkit.recipe import Recipe
from quantkit.schemes import WeightScheme

if TYPE_CHECKING:
    from quantkit.methods.kernels import learning


class Reach(NamedTuple):
    """How far all steps together move, half of it while the rate falls."""

    codes: float
    """Positions, in cells."""
    scales: float
    """Scales, relative to the scale."""


REACH = Reach(codes=0.1, scales=0.03)
INSIDE = 0.45
"""How far from the middle of its cell a position may start."""
MOMENTUM = 0.8
"""The share of the mean gradient that later steps keep: the sign of one batch's gradient is mostly
noise."""
HELD = 8
"""One in this many batches is held out."""


@dataclass
class Scaled:
    """The trainable state of one linear: its scales."""

    before: grid.QuantizedWeight
    scheme: WeightScheme
    factors: torch.Tensor
    """Factors of the scales, one each."""

    @classmethod
    def of(cls, made: grid.QuantizedWeight, scheme: WeightScheme, *more: torch.Tensor) -> Self:
        """The state of a linear before its first step."""
        made = replace(made, scale=made.scale.contiguous())
        if made.zero_point is not None:
            made = replace(made, zero_point=made.zero_point.contiguous())
        steps = numbers.of(scheme).steps(made.scale, made.global_scale)
        return cls(made, scheme, torch.ones_like(steps.unsqueeze(-1)), *more)

    def weight(self) -> torch.Tensor:
        """The weights that this represents."""
        number = numbers.of(self.scheme)
        steps = number.steps(self._stored(), self.before.global_scale).unsqueeze(-1)
        return grid.untile(self._plain() * steps, self.before.values.shape, self.scheme)

    def slopes(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of what moves, by the loss's gradient with respect to the weights; rounding
        counts as if it were not there.
        """
        tiles = grid.tiles(gradient.float(), self.scheme)
        return [(tiles * self._plain()).sum(-1, keepdim=True) * self._unit()]

    def means(self) -> list[torch.Tensor]:
        """Zeros, one for each slope; signs are all that is used, so half the bytes will do."""
        return [torch.zeros_like(self.factors, dtype=torch.bfloat16)]

    def learn(self, gradient: torch.Tensor, means: list[torch.Tensor], momentum: float) -> None:
        """Count the slopes of a gradient in their means."""
        for mean, slope in zip(means, self.slopes(gradient), strict=True):
            mean.mul_(momentum).add_(slope.mul_(1 - momentum))

    def move(self, slopes: list[torch.Tensor], share: float, reach: Reach) -> None:
        """One step against the signs of slopes; `share` is that of the total movement."""
        self.factors.sub_(slopes[0].sign(), alpha=share * reach.scales)

    def rewrite(
        self, weight: torch.Tensor, slopes: list[torch.Tensor], share: float, reach: Reach
    ) -> None:
        """Move, and replace the weights by the new ones."""
        self.move(slopes, share, reach)
        weight.copy_(self.weight())

    def quantized(self) -> grid.QuantizedWeight:
        """The new codes and scales."""
        return grid.QuantizedWeight(
            self._values(), self._stored(), self.before.zero_point, self.before.global_scale
        )

    def _values(self) -> torch.Tensor:
        return self.before.values

    def _plain(self) -> torch.Tensor:
        """What scales are multiplied by, as tiles."""
        plain = numbers.of(self.scheme).widen(grid.tiles(self._values(), self.scheme))
        if self.before.zero_point is not None:
            plain = plain - self.before.zero_point.float().unsqueeze(-1)
        return plain

    def _unit(self) -> torch.Tensor:
        """The steps before the first move."""
        number = numbers.of(self.scheme)
        return number.steps(self.before.scale, self.before.global_scale).unsqueeze(-1)

    def _stored(self) -> torch.Tensor:
        """The nearest scales that can be stored."""
        steps = (self._unit() * self.factors).squeeze(-1)
        number = numbers.of(self.scheme)
        return number.nearest_scale(steps, self.before.scale, self.before.global_scale)


@dataclass
class Position(Scaled):
    """The trainable state of one linear: positions of its codes, and its scales.

    On a GPU, integers learn and move by one kernel each: twenty small ones would keep it waiting.
    """

    codes: torch.Tensor
    """In float32, as tiles; a code is the number nearest to it."""

    @classmethod
    def towards(
        cls, weight: torch.Tensor, made: grid.QuantizedWeight, scheme: WeightScheme
    ) -> "Position":
        """Each code's position is as near to the weight as its cell allows."""
        number = numbers.of(scheme)
        steps = number.steps(made.scale, made.global_scale).unsqueeze(-1)
        middle = number.widen(grid.tiles(made.values, scheme))
        wanted = grid.tiles(weight, scheme) / steps
        if made.zero_point is not None:
            wanted += made.zero_point.float().unsqueeze(-1)
        reach = INSIDE * _cells(0.99 * middle, scheme)  # towards zero cells are narrower
        codes = torch.clamp(wanted, middle - reach, middle + reach).clamp_(*number.limits)
        return cls.of(made, scheme, codes.contiguous())

    def slopes(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        if self._is_fused:
            from quantkit.methods.kernels import learning

            found = [torch.empty_like(self.factors), torch.empty_like(self.codes)]
            learning.learn(self._linear, gradient, found, momentum=0.0)
            return found
        of_codes = grid.tiles(gradient.float(), self.scheme) * (self._unit() * self.factors)
        return [*super().slopes(gradient), of_codes]

    def means(self) -> list[torch.Tensor]:
        return [*super().means(), torch.zeros_like(self.codes, dtype=torch.bfloat16)]

    def learn(self, gradient: torch.Tensor, means: list[torch.Tensor], momentum: float) -> None:
        if self._is_fused:
            from quantkit.methods.kernels import learning

            learning.learn(self._linear, gradient, means, momentum)
        else:
            super().learn(gradient, means, momentum)

    def move(self, slopes: list[torch.Tensor], share: float, reach: Reach) -> None:
        super().move(slopes, share, reach)
        cells = _cells(self.codes, self.scheme)
        self.codes.sub_(slopes[1].sign() * cells, alpha=share * reach.codes)
        self.codes.clamp_(*numbers.of(self.scheme).limits)

    def rewrite(
        self, weight: torch.Tensor, slopes: list[torch.Tensor], share: float, reach: Reach
    ) -> None:
        if self._is_fused:
            from quantkit.methods.kernels import learning

            by = share * reach.codes, share * reach.scales
            self.factors = learning.move(self._linear, slopes, by, weight)
        else:
            super().rewrite(weight, slopes, share, reach)

    @property
    def _is_fused(self) -> bool:
        return self.codes.device.type == "cuda" and self.scheme.kind == "int"

    @property
    def _linear(self) -> "learning.Linear":
        from quantkit.methods.kernels import learning

        scale, zero_point = self.before.scale, self.before.zero_point
        limits = numbers.of(self.scheme).limits
        return learning.Linear(self.codes, self.factors, scale, zero_point, limits)

    def _values(self) -> torch.Tensor:
        values = numbers.of(self.scheme).round(self.codes.clone())
        return grid.untile(values, self.before.values.shape, self.scheme)


def _cells(values: torch.Tensor, scheme: WeightScheme) -> torch.Tensor | float:
    """The spacing of numbers around these."""
    if scheme.kind != "fp4":
        return 1.0
    size = values.detach().abs()
    return torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))


def can_tune(scheme: WeightScheme) -> bool:
    """Whether the numbers have codes and scales that gradients can move."""
    return scheme.kind in ("int", "fp4") and scheme.strategy in ("group", "tensor_group", "channel")


def tune(visit: Visit, work: Work, result: BlockResult, recipe: Recipe, steps: int) -> None:
    """Replace the linears of a result by better ones, where held-out batches confirm it.

    The stream has not advanced yet; the source's own, in parallel, has.
    """
    wanted = visit.stream.source
    if wanted is None or steps < 1:
        return
    schemes = {name: recipe.part(visit.module(name)).weights for name in result.linears}
    positions = {
        name: Position.towards(work.weight(name), linear.quantized, schemes[name])
        for name, linear in result.linears.items()
        if can_tune(schemes[name])
    }
    if not positions:
        return
    state = visit.after(result, recipe)
    with visit.decoder.loaded(visit.index, state) as block:
        block.requires_grad_(False)
        lesson = _Lesson(visit, block, wanted)
        before = lesson.held_out_error({})
        dtype = visit.decoder.dtype
        weights = {name: position.weight().to(dtype) for name, position in positions.items()}
        means = {name: position.means() for name, position in positions.items()}
        with reproducible():
            for step, place in enumerate(lesson.order(steps)):
                share = falling(step, steps)
                for name, gradient in lesson.gradients(place, weights).items():
                    positions[name].learn(gradient, means[name], MOMENTUM)
                    positions[name].rewrite(weights[name], means[name], share, REACH)
        after = lesson.held_out_error(weights)
    if not after < before:
        return
    for name, position in positions.items():
        made = position.quantized()
        result.linears[name] = work.remeasured(name, replace(result.linears[name], quantized=made))


def divided(n_batches: int, one_in: int = HELD) -> tuple[list[int], list[int]]:
    """Training and held-out batches; a single batch is both."""
    held = list(range(n_batches - max(1, n_batches // one_in), n_batches))
    return list(range(n_batches - len(held))) or held, held


def in_turn(batches: list[int], steps: int, seed: int) -> list[int]:
    """The batch of every step: all in turn, in another order each time."""
    generator = torch.Generator().manual_seed(seed)
    places: list[int] = []
    while len(places) < steps:
        order = torch.randperm(len(batches), generator=generator).tolist()
        places += [batches[i] for i in order]
    return places[:steps]


def falling(step: int, steps: int) -> float:
    """A step's share of the total movement: falls linearly, sums to one."""
    return 2 * (steps - step) / (steps * (steps + 1))


class _Lesson:
    """A block with other weights, on batches of its stream, against the source's output."""

    def __init__(self, visit: Visit, block: torch.nn.Module, wanted: HiddenStates) -> None:
        self._visit, self._block = visit, block
        n_samples = samples_per_batch(visit.decoder.device, visit.padding.length)
        self._given, self._wanted = visit.stream.hidden.split(n_samples), wanted.split(n_samples)
        self._taught, self._held = divided(len(visit.padding.learnt))

    def order(self, steps: int) -> list[int]:
        """The batch of every step."""
        return in_turn(self._taught, steps, self._visit.index)

    def gradients(self, place: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients of one batch."""
        given = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        with torch.enable_grad():
            found = gradients(self._error(place, given), list(given.values()))
        return dict(zip(weights, found, strict=True))

    @torch.no_grad()
    def held_out_error(self, weights: Mapping[str, torch.Tensor]) -> float:
        """Error on the held-out batches."""
        return sum(self._error(place, weights).item() for place in self._held)

    def _error(self, place: int, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        visit = self._visit
        batch, wanted = self._given.batch(place), self._wanted.batch(place)
        arguments = visit.stream.arguments(visit.call, place, len(batch), visit.decoder.device)
        given = {f"{name}.weight": weight for name, weight in weights.items()}

        def block(states: torch.Tensor, **more: Any) -> Any:
            return torch.func.functional_call(self._block, given, (states,), more)

        output = visit.decoder.run(block, batch, arguments)
        keep = visit.padding.learnt[place]
        return relative_error(real(output, keep), real(wanted, keep))


def relative_error(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of the squared error relative to the token's own size, which is what the
    next norm sees: states of a first token are often hundreds of times as large as all others.
    """
    change = (output - wanted).float().square().sum(-1)
    size = wanted.float().square().sum(-1)
    return (change / size.clamp(min=1e-6 * size.mean())).mean()  # a token may be all zeros


def gradients(
    loss: torch.Tensor, inputs: Sequence[torch.Tensor], slope: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Zero for what the loss does not depend on smoothly, such as weights that choose tokens."""
    return torch.autograd.grad(loss, inputs, slope, allow_unused=True, materialize_grads=True)


@contextmanager
def reproducible() -> Iterator[None]:
    """Deterministic gradients, where torch has them."""
    import warnings

    from torch.utils import deterministic

    before: Any = torch.are_deterministic_algorithms_enabled()
    memory: Any = deterministic
    fills = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # one more kernel for most new tensors
        try:
            yield
        finally:
            memory.fill_uninitialized_memory = fills
            torch.use_deterministic_algorithms(before)
