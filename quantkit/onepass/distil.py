"""End-to-end distillation of scales: the last stage of a recipe, after all blocks.

Each block was fitted to its own part of the source. The joint effect of all blocks' errors shows
only at the end, in the probabilities of the next token. Here every scale of every block moves a
little, such that these come closer to the source's (KL divergence over the whole vocabulary, as in
distillation). Codes stay fixed: there are too many of them for the calibration tokens, and on
unseen text they get worse. Held-out batches decide whether the new scales are used.

The model is never in memory in 16 bits. Codes of all blocks stay on the device, one block at a time
is dequantised, and in the backward pass it is run again from its input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from quantkit import device as devices
from quantkit import formats, grid, numbers
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.export.folder import FolderWriter
from quantkit.model.block_calls import Call
from quantkit.model.blocks import Decoder
from quantkit.onepass import stored
from quantkit.onepass.hidden_states import HiddenStates
from quantkit.onepass.journal import Journal
from quantkit.onepass.tuning import Scaled, can_tune, divided, falling, in_turn, ones, reproducible
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress

REACH = 0.01
"""How far all steps together move a scale, relative to it."""
MOMENTUM = 0.9
"""Momentum: the share of the mean gradient that later steps keep."""
POSITIONS = 1024
"""Tokens whose logits are in memory at once."""
WORKING = 1.25
"""Memory per code: a byte each, and what one block takes in turn."""
FILE = "distilled.safetensors"
"""In the journal: the scales that were found, before any is written."""

LogitsOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Lesson:
    """The training data."""

    decoder: Decoder
    calls: Sequence[Call]
    start: HiddenStates
    """States before the first block ..."""
    goal: HiddenStates
    """... and the source's own after the last."""
    calibration: CalibrationTokens

    @cached_property
    def samples(self) -> list[list[torch.Tensor]]:
        """Tokens of every batch, without padding."""
        ids, lengths = self.calibration.ids, self.calibration.lengths
        cut = [row[: int(lengths[i])] if lengths is not None else row for i, row in enumerate(ids)]
        size = len(self.start.batch(0))
        return [cut[start : start + size] for start in range(0, len(cut), size)]


def distil(
    lesson: Lesson, plan: Plan, writer: FolderWriter, journal: Journal, progress: Progress
) -> None:
    """Replace the scales of a checkpoint whose blocks are all written, where others are better."""
    found = journal.kept(FILE)
    if found is None:
        try:
            found = _learn(lesson, plan, writer, progress) if _has_room(lesson, plan) else None
        except torch.OutOfMemoryError:
            found = None
        if found is None:
            progress.note(
                f"{lesson.decoder.device} has no room for all blocks of {plan.recipe.name} at "
                "once; its scales are not tuned further"
            )
            found = {}
        journal.keep(FILE, found)
    for name, tensor in found.items():
        writer.replace(name, tensor)
    writer.flush()
    for module in {name.rpartition(".")[0] for name in found}:
        _remeasure(lesson.decoder, module, plan, writer, journal)


def _has_room(lesson: Lesson, plan: Plan) -> bool:
    """Whether the codes of all blocks fit beside what is there, with some room to work."""
    free = devices.free_bytes(lesson.decoder.device)
    n_codes = sum(tensor.n_elements for tensor in plan.quantized.values())
    return free is None or n_codes * WORKING < free


def _learn(
    lesson: Lesson, plan: Plan, writer: FolderWriter, progress: Progress
) -> dict[str, torch.Tensor]:
    """The tensors of better scales, by name; empty where held-out batches show no gain."""
    student = _Student(lesson, plan, writer)
    taught, held = divided(len(lesson.samples))
    steps = plan.recipe.distilling_passes * len(taught)
    progress.start(f"distil {plan.recipe.name}", steps, "steps")
    with lesson.decoder.head() as logits_of, reproducible():
        before = student.divergence(held, logits_of)
        for step, place in enumerate(in_turn(taught, steps, seed=0)):
            student.learn(place, logits_of)
            student.move(falling(step, steps) * REACH)
            progress.advance(1)
        after = student.divergence(held, logits_of)
    progress.finish()
    kept = "taken" if after < before else "left as they were"
    progress.note(
        f"{plan.recipe.name}: KL on held-out calibration tokens {before:.4f}, {after:.4f} with "
        f"distilled scales, which are {kept}"
    )
    return student.scales(writer) if after < before else {}


class _Student:
    """The quantised model, one block at a time, with trainable scales."""

    def __init__(self, lesson: Lesson, plan: Plan, writer: FolderWriter) -> None:
        self._lesson, self._plan = lesson, plan
        decoder = lesson.decoder
        self._plain: list[dict[str, torch.Tensor]] = []
        self._linears: list[dict[str, Scaled]] = []
        for index in range(len(decoder.blocks)):
            plain, made = stored.read_block(decoder, index, plan, writer)
            self._plain.append(plain)
            schemes = {n: plan.recipe.part(decoder.module(index, n)).weights for n in made}
            self._linears.append(
                {n: Scaled(q, schemes[n], ones(q, schemes[n])) for n, q in made.items()}
            )
        self._learning = [
            (index, name)
            for index, linears in enumerate(self._linears)
            for name, linear in linears.items()
            if can_tune(linear.scheme)
        ]
        self._gradients: dict[tuple[int, str], torch.Tensor] = {}
        self._means: dict[tuple[int, str], torch.Tensor] = {}

    def _weights(self, index: int) -> dict[str, torch.Tensor]:
        """Weights of a block in the compute dtype; gradients reach the factors of scales."""
        made = {}
        for name, linear in self._linears[index].items():
            tiles = grid.tiles(linear.before.values, linear.scheme)
            plain = numbers.of(linear.scheme).widen(tiles)
            made[f"{name}.weight"] = linear.times(plain).to(self._lesson.decoder.dtype)
        return made

    @torch.no_grad()
    def _inputs(self, place: int) -> list[torch.Tensor]:
        """Inputs of every block, and the last block's output."""
        lesson, states = self._lesson, self._lesson.start.batch(place)
        found = [states]
        for index, call in enumerate(lesson.calls):
            state = self._plain[index] | self._weights(index)
            with lesson.decoder.loaded(index, state) as block:
                arguments = call.of_batch(place, len(states), lesson.decoder.device)
                states = lesson.decoder.run(block, states, arguments)
            found.append(states)
        return found

    def divergence(self, places: list[int], logits_of: LogitsOf) -> float:
        """KL divergence from the source, in nats per token."""
        total, n_tokens = 0.0, 0
        for place in places:
            total += self._end(place, self._inputs(place)[-1], logits_of)[0]
            n_tokens += sum(len(ids) for ids in self._lesson.samples[place])
        return total / n_tokens

    def learn(self, place: int, logits_of: LogitsOf) -> None:
        """Accumulate the gradients of one batch, for every scale."""
        lesson, decoder = self._lesson, self._lesson.decoder
        inputs = self._inputs(place)
        gradient = self._end(place, inputs.pop(), logits_of)[1]
        self._gradients.clear()
        for index in reversed(range(len(inputs))):
            learning = [(i, name) for i, name in self._learning if i == index]
            factors = [self._linears[i][name].factors.requires_grad_() for i, name in learning]
            states = inputs.pop().detach().requires_grad_()
            with torch.enable_grad():
                weights = self._weights(index)
                fixed = self._plain[index] | {n: w.detach() for n, w in weights.items()}
                with decoder.loaded(index, fixed) as block:
                    block.requires_grad_(False)
                    arguments = lesson.calls[index].of_batch(place, len(states), decoder.device)
                    output = torch.func.functional_call(block, weights, (states,), arguments)
                    output = output[0] if isinstance(output, tuple) else output
                    found = torch.autograd.grad(output, [states, *factors], gradient)
            gradient = found[0]
            self._gradients |= dict(zip(learning, found[1:], strict=True))

    def _end(
        self, place: int, states: torch.Tensor, logits_of: LogitsOf
    ) -> tuple[float, torch.Tensor]:
        """The divergence of a batch, summed, and the gradient of its mean with respect to the last
        states.
        """
        samples = self._lesson.samples[place]
        wanted, n_tokens = self._lesson.goal.batch(place), sum(map(len, samples))
        gradient, total = torch.zeros_like(states), 0.0
        for sample, ids in enumerate(samples):
            for start in range(0, len(ids), POSITIONS):
                part = slice(start, start + len(ids[start : start + POSITIONS]))
                tokens = ids[None, part]
                with torch.no_grad():
                    source = logits_of(wanted[sample : sample + 1, part], tokens).log_softmax(-1)
                own = states[sample : sample + 1, part].detach().requires_grad_()
                with torch.enable_grad():
                    made = logits_of(own, tokens).log_softmax(-1)
                    loss = (source.exp() * (source - made)).sum()
                    (slope,) = torch.autograd.grad(loss, own)
                gradient[sample, part] = (slope / n_tokens)[0]
                total += loss.item()
        return total, gradient

    @torch.no_grad()
    def move(self, reach: float) -> None:
        """One step against the sign of every mean gradient."""
        for place, gradient in self._gradients.items():
            mean = self._means.setdefault(place, torch.zeros_like(gradient))
            mean.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
            index, name = place
            self._linears[index][name].factors.sub_(mean.sign(), alpha=reach)

    def scales(self, writer: FolderWriter) -> dict[str, torch.Tensor]:
        """The stored form of the new scales, where it differs from the old."""
        found = {}
        for index, name in self._learning:
            linear = self._linears[index][name]
            module = self._lesson.decoder.module(index, name)
            made = linear.with_scales(linear.before.values)
            for tensor, value in formats.pack(module, made, self._plan.recipe, None).items():
                value = value.cpu()
                if not torch.equal(value, writer.stored(tensor).read()):
                    found[tensor] = value
        return found


def _remeasure(
    decoder: Decoder, module: str, plan: Plan, writer: FolderWriter, journal: Journal
) -> None:
    """Record a layer's new distance from the source; its output error is no longer known."""
    specs = formats.specs(module, plan.quantized[module], plan.recipe)
    parts = {spec.name: writer.stored(spec.name).read() for spec in specs}
    made = formats.unpack(module, parts, plan.recipe)
    weight = grid.dequantize(made, plan.recipe.part(module).weights)
    scaled = [journal.scales.get(f"{module}.{side}_scale") for side in ("in", "out")]
    original = decoder.source.tensors[f"{module}.weight"].read()
    error = grid.relative_error(original, grid.unfold(weight, *scaled))
    layer = journal.layers[module]
    changed = {"relative_error": error, "output_error": None}
    journal.layers[module] = layer.model_copy(update=changed)
