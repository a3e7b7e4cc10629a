"""End-to-end distillation of codes and scales: the last stage of a recipe, after all blocks.

Each block was fitted to its own part of the source. The joint effect of all blocks' errors shows
only at the end, in the probabilities of the next token. Here every code and every scale of every
block moves a little, such that these come closer to the source's (KL divergence over the whole
vocabulary, as in distillation). Steps are small: larger ones learn the calibration tokens by heart.
Held-out batches decide whether the result is used.

All blocks stay on the device. The last ones, as many as fit into free memory, keep what their
backward pass needs; the others are run again from their inputs. Where there is no room for all
blocks, codes keep their numbers and one block at a time is dequantised; only scales move.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from quantkit import device as devices
from quantkit import formats, grid
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.export.folder import FolderWriter
from quantkit.model.block_calls import Call
from quantkit.model.blocks import Decoder
from quantkit.onepass import stored
from quantkit.onepass.estimate import DISTILLED_BYTES, DISTILLED_SCALES_BYTES
from quantkit.onepass.hidden_states import HiddenStates
from quantkit.onepass.journal import Journal
from quantkit.onepass.tuning import (
    Position,
    Reach,
    Scaled,
    can_tune,
    divided,
    falling,
    gradients,
    in_turn,
    reproducible,
)
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress
from quantkit.schemes import WeightScheme

REACH = Reach(codes=0.1, scales=0.02)
STEP = 4e-4
"""How far codes move per step at most, on average: too many that change at once do harm."""
MOMENTUM = 0.9
"""Momentum: the share of the mean gradient that later steps keep."""
HELD = 16
"""One in this many batches is held out."""
POSITIONS = 2048
"""Tokens whose logits are in memory at once."""
SPARE = 0.5
"""The share of free memory that blocks may fill with what their backward pass needs."""
FILE = "distilled.safetensors"
"""In the journal: what was found, before any is written."""

Found = tuple[dict[str, torch.Tensor], list[str]]
"""Tensors to replace, by name, and what the manifest says about them."""
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
        """Tokens of every batch, without padding; on the device, or every use would wait for it."""
        ids, lengths = self.calibration.ids.to(self.decoder.device), self.calibration.lengths
        cut = [row[: int(lengths[i])] if lengths is not None else row for i, row in enumerate(ids)]
        size = len(self.start.batch(0))
        return [cut[start : start + size] for start in range(0, len(cut), size)]


def distil(
    lesson: Lesson, plan: Plan, writer: FolderWriter, journal: Journal, progress: Progress
) -> None:
    """Replace codes and scales of a checkpoint whose blocks are all written, where others are
    better.
    """
    found = journal.stored(FILE)
    if found is None:
        found, notes = _found(lesson, plan, writer, journal, progress)
        for note in notes:
            progress.note(f"{plan.recipe.name}: {note}")
        journal.keep_notes(notes)
        journal.store(FILE, found)
    plan.notes.extend(journal.notes)
    for name, tensor in found.items():
        writer.replace(name, tensor)
    writer.flush()
    for module in {name.rpartition(".")[0] for name in found}:
        _remeasure(lesson.decoder, module, plan, writer, journal)


def _found(
    lesson: Lesson, plan: Plan, writer: FolderWriter, journal: Journal, progress: Progress
) -> Found:
    """By as much learning as there is room for."""
    device = lesson.decoder.device
    n_codes = sum(tensor.n_elements for tensor in plan.quantized.values())
    for keeper, bytes_each in ((journal, DISTILLED_BYTES), (None, DISTILLED_SCALES_BYTES)):
        free = devices.free_bytes(device)
        if free is not None and n_codes * bytes_each > free:
            continue
        found = _tried(_Student(lesson, plan, writer, keeper), plan, progress)
        if found is None:
            gc.collect()
            torch.cuda.empty_cache()
            continue
        if keeper is None:
            found[1].append(
                f"only scales were distilled: too little memory on {device} for codes, which "
                f"take about {n_codes * DISTILLED_BYTES / 2**30:.0f} GiB"
            )
        return found
    return {}, [f"not distilled: too little memory on {device} for all blocks at once"]


def _tried(student: "_Student", plan: Plan, progress: Progress) -> Found | None:
    """None where memory runs out after all."""
    try:
        with student:
            return _learn(student, plan, progress)
    except torch.OutOfMemoryError:
        progress.finish()
        return None


def _learn(student: "_Student", plan: Plan, progress: Progress) -> Found:
    """No tensors where held-out batches show no gain."""
    lesson = student.lesson
    taught, held = divided(len(lesson.samples), HELD)
    steps = plan.recipe.distilling_passes * len(taught)
    reach = REACH._replace(codes=min(REACH.codes, STEP * steps))
    progress.start(f"distil {plan.recipe.name}", steps, "steps")
    with lesson.decoder.head() as logits_of, reproducible():
        before = student.divergence(held, logits_of)
        for step, place in enumerate(in_turn(taught, steps, seed=0)):
            student.learn(place, logits_of)
            if step == 0:  # gradients and their means are in memory from now on
                student.keep_graphs(place)
            student.move(falling(step, steps), reach)
            progress.advance(1)
        after = student.divergence(held, logits_of)
    progress.finish()
    if after < before:
        note = f"distilled: KL on held-out calibration tokens went from {before:.4f} to {after:.4f}"
        return student.changed(), [note]
    note = "not distilled: KL on held-out calibration tokens would have gone from "
    return {}, [f"{note}{before:.4f} to {after:.4f}"]


class _Learner:
    """One linear, and the mean of its gradients."""

    def __init__(self, linear: Scaled) -> None:
        self.linear = linear
        self._means: list[torch.Tensor] = []

    def learn(self, gradient: torch.Tensor) -> None:
        """Count the gradient with respect to the weights."""
        self._means = self._means or self.linear.means()
        self.linear.learn(gradient, self._means, MOMENTUM)

    def move(self, share: float, reach: Reach, weight: torch.Tensor | None) -> None:
        """One step; where there is a loaded weight, it moves too."""
        if weight is None:
            self.linear.move(self._means, share, reach)
        else:
            self.linear.rewrite(weight, self._means, share, reach)


class _Student:
    """The quantised model with trainable scales and, with a journal, codes.

    Codes need the weights that they stand for, and the journal has the scales folded into these.
    """

    def __init__(
        self, lesson: Lesson, plan: Plan, writer: FolderWriter, journal: Journal | None
    ) -> None:
        self.lesson = lesson
        self._plan, self._writer, self._journal = plan, writer, journal
        self._plain: list[dict[str, torch.Tensor]] = []
        self._learners: list[dict[str, _Learner]] = []
        self._resident: list[torch.nn.Module] = []
        self._n_graphs = 0
        """Blocks, the last ones, that need not be run again for the backward pass."""
        self._stack = ExitStack()

    def __enter__(self) -> "_Student":
        with ExitStack() as stack:
            for index in range(len(self.lesson.decoder.blocks)):
                self._read(index)
                if self._journal is not None:
                    self._resident.append(stack.enter_context(self._loaded(index)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resident.clear()
        self._stack.close()

    def _read(self, index: int) -> None:
        """Take a block's numbers from the files."""
        decoder = self.lesson.decoder
        plain, made = stored.read_block(decoder, index, self._plan, self._writer)
        learners = {}
        for name, quantized in made.items():
            scheme = self._plan.recipe.part(decoder.module(index, name)).weights
            if can_tune(scheme):
                learners[name] = _Learner(self._state(index, name, quantized, scheme))
            else:
                plain[f"{name}.weight"] = grid.dequantize(quantized, scheme)
        self._plain.append(plain)
        self._learners.append(learners)

    def _state(
        self, index: int, name: str, made: grid.QuantizedWeight, scheme: WeightScheme
    ) -> Scaled:
        if self._journal is None:
            return Scaled.of(made, scheme)
        decoder, folded = self.lesson.decoder, self._journal.scales
        module = decoder.module(index, name)
        weight = decoder.tensors(index)[f"{name}.weight"].read().to(decoder.device).float()
        scales = [folded.get(f"{module}.{side}_scale") for side in ("in", "out")]
        given = [None if s is None else s.to(decoder.device).float() for s in scales]
        return Position.towards(grid.fold(weight, *given), made, scheme)

    @contextmanager
    def _loaded(self, index: int) -> Iterator[torch.nn.Module]:
        made = {f"{n}.weight": each.linear.weight() for n, each in self._learners[index].items()}
        with self.lesson.decoder.loaded(index, self._plain[index] | made) as block:
            block.requires_grad_(False)
            for name in made:
                block.get_parameter(name).requires_grad_()
            yield block

    def _block(self, index: int) -> AbstractContextManager[torch.nn.Module]:
        """A block with the weights of now."""
        return nullcontext(self._resident[index]) if self._resident else self._loaded(index)

    def _run(
        self, index: int, block: torch.nn.Module, place: int, states: torch.Tensor
    ) -> torch.Tensor:
        decoder = self.lesson.decoder
        arguments = self.lesson.calls[index].of_batch(place, len(states), decoder.device)
        return decoder.run(block, states, arguments)

    def _inputs(self, place: int, n_blocks: int) -> list[torch.Tensor]:
        """Inputs of the first blocks, and the last of these blocks' output."""
        found = [self.lesson.start.batch(place)]
        for index in range(n_blocks):
            with self._block(index) as block:
                found.append(self._run(index, block, place, found[-1]))
        return found

    def divergence(self, places: list[int], logits_of: LogitsOf) -> float:
        """KL divergence from the source, in nats per token."""
        total, n_tokens = 0.0, 0
        for place in places:
            states = self._inputs(place, len(self._learners))[-1]
            total += self._end(place, states, logits_of)[0].item()
            n_tokens += sum(len(ids) for ids in self.lesson.samples[place])
        return total / n_tokens

    def learn(self, place: int, logits_of: LogitsOf) -> None:
        """Count the gradients of one batch."""
        n_blocks = len(self._learners)
        inputs = self._inputs(place, n_blocks - self._n_graphs)
        outputs: list[torch.Tensor] = []
        for index in range(n_blocks - self._n_graphs, n_blocks):
            inputs[-1] = inputs[-1].detach().requires_grad_()
            with torch.enable_grad():
                outputs.append(self._run(index, self._resident[index], place, inputs[-1]))
            inputs.append(outputs[-1].detach())
        gradient = self._end(place, inputs.pop(), logits_of)[1]
        for index in reversed(range(n_blocks)):
            states, learners = inputs.pop(), self._learners[index]
            with self._block(index) as block, torch.enable_grad():
                weights = [block.get_parameter(f"{name}.weight") for name in learners]
                if outputs:
                    output = outputs.pop()
                else:
                    states = states.detach().requires_grad_()
                    output = self._run(index, block, place, states)
                gradient, *found = gradients(output, [states, *weights], gradient)
            for learner, slope in zip(learners.values(), found, strict=True):
                learner.learn(slope)

    def keep_graphs(self, place: int) -> None:
        """From the second step on, let as many blocks keep their graphs as fit into memory."""
        free = devices.free_bytes(self.lesson.decoder.device)
        if self._resident and free is not None:
            needed = self._graph_bytes(place)
            self._n_graphs = min(len(self._resident), int(SPARE * free / max(1, needed)))

    def _graph_bytes(self, place: int) -> int:
        """What the backward pass of the last block needs besides weights."""
        block, sizes = self._resident[-1], {}
        own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        states = self.lesson.start.batch(place).detach().requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with torch.enable_grad(), hooks:
            self._run(len(self._resident) - 1, block, place, states)
        return sum(sizes.values())

    def _end(
        self, place: int, states: torch.Tensor, logits_of: LogitsOf
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The divergence of a batch, summed, and the gradient of its mean with respect to the last
        states.
        """
        samples = self.lesson.samples[place]
        wanted, n_tokens = self.lesson.goal.batch(place), sum(map(len, samples))
        gradient, total = torch.zeros_like(states), torch.zeros((), device=states.device)
        for part in _parts(list(map(len, samples))):
            tokens = torch.stack(samples[part[0]])[:, part[1]]
            source = logits_of(wanted[part], tokens).log_softmax(-1)
            own = states[part].detach().requires_grad_()
            with torch.enable_grad():
                logits = logits_of(own, tokens)
            made = logits.detach().log_softmax(-1)
            likely = source.exp()
            total += (likely * source.sub_(made)).sum()
            slope = made.exp_().sub_(likely).div_(n_tokens)
            (gradient[part],) = torch.autograd.grad(logits, own, slope)
        return total, gradient

    def move(self, share: float, reach: Reach) -> None:
        """One step against the sign of every mean gradient."""
        for index, learners in enumerate(self._learners):
            for name, learner in learners.items():
                weight = None
                if self._resident:
                    weight = self._resident[index].get_parameter(f"{name}.weight").detach()
                learner.move(share, reach, weight)

    def changed(self) -> dict[str, torch.Tensor]:
        """The stored form of everything that differs from before."""
        found = {}
        for index, learners in enumerate(self._learners):
            for name, learner in learners.items():
                module = self.lesson.decoder.module(index, name)
                made = learner.linear.quantized()
                for tensor, value in formats.pack(module, made, self._plan.recipe, None).items():
                    value = value.cpu()
                    if not torch.equal(value, self._writer.stored(tensor).read()):
                        found[tensor] = value
        return found


def _parts(lengths: list[int]) -> Iterator[tuple[slice, slice]]:
    """Samples and positions whose logits fit into memory at once: samples of the same length in a
    row, or some positions of a long one.
    """
    first = 0
    for length, alike in groupby(lengths):
        last = first + len(list(alike))
        at_once = max(1, POSITIONS // max(1, length))
        for sample in range(first, last, at_once):
            for start in range(0, length, POSITIONS):
                end = min(length, start + POSITIONS)
                yield slice(sample, min(last, sample + at_once)), slice(start, end)
        first = last


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
