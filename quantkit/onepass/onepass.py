"""The calibrated pass: stream the decoder blocks once, and let every recipe make its checkpoint.

Recipes that do not propagate share one stream of hidden states, the source's own, and one set of
statistics. A recipe that propagates has its own stream: it sees its own quantised blocks. So a
recipe's output does not depend on which others run with it.

While a block is computed, the next one is read and the previous one is written. Several ranks
process the same blocks in parallel, each with its share of the samples; the first one writes.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quantkit.calibration.images import TYPES, Vision
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import HardwareError, MethodError, RecipeError
from quantkit.export.folder import FolderWriter
from quantkit.export.manifest import Layer
from quantkit.model import experts
from quantkit.model.block_calls import Call
from quantkit.model.blocks import Decoder
from quantkit.model.source import ModelSource
from quantkit.onepass import datafree, distil, probe, tuning
from quantkit.onepass.calibrated import Work, solve
from quantkit.onepass.clock import Clock
from quantkit.onepass.datafree import copy_tensor, require_finite
from quantkit.onepass.delivery import Delivery
from quantkit.onepass.estimate import n_merged, samples_per_batch
from quantkit.onepass.finished_block import FinishedBlock, Status
from quantkit.onepass.hidden_states import HiddenStates
from quantkit.onepass.importance import Importance
from quantkit.onepass.journal import Journal
from quantkit.onepass.padding import Padding
from quantkit.onepass.ranks import Ranks
from quantkit.onepass.result import BlockResult
from quantkit.onepass.streams import Stream, streams_of
from quantkit.onepass.visit import Fed, Observation, Visit
from quantkit.onepass.watcher import Watcher
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress, Silent

MAX_FALLBACK_SHARE = 0.01
UNTAUGHT = (
    "no gradient steps and no distillation, since this model's blocks pass each other more than "
    "hidden states"
)


@dataclass
class CalibratedOutcome:
    """The result of the pass for one recipe."""

    layers: dict[str, Layer]
    scales: dict[str, torch.Tensor]
    """Folded scales by name, which a check against the source needs."""
    perplexity: float | None = None
    """Perplexity of the calibration tokens."""


@dataclass(frozen=True)
class Pass:
    """What one pass reads, and what it fills."""

    source: ModelSource
    plans: Sequence[Plan]
    calibration: CalibrationTokens
    device: torch.device
    writers: Sequence[FolderWriter] = ()
    """One per plan; ranks other than the first have none ..."""
    journals: Sequence[Journal] = ()
    """... and no journals."""
    importance: Importance | None = None
    """Filled on the way, from the source's own stream."""
    progress: Progress = field(default_factory=Silent)
    ranks: Ranks = field(default_factory=Ranks)
    watcher: Watcher | None = None
    """Observes the source's own stream as well; in one process only."""
    clock: Clock = field(default_factory=Clock)
    shares_experts: bool = False
    """Experts share the statistics of their common input, for lack of memory."""
    copied: set[str] = field(default_factory=set)
    """Tensors that no recipe changes, once they are written."""

    def own(self, place: int) -> AbstractContextManager[None]:
        """Attributes the time spent within to one recipe."""
        return self.clock.on(self.device, self.plans[place].recipe.name)


def quantize_blocks(wanted: Pass, offload: str = "auto") -> list[CalibratedOutcome]:
    """Fill every writer with the tensors of the blocks, except those that a journal lists as done.

    Ranks other than the first get no outcomes.
    """
    source, plans, writers, journals = wanted.source, wanted.plans, wanted.writers, wanted.journals
    device, progress, ranks = wanted.device, wanted.progress, wanted.ranks
    importance, on_host = wanted.importance, offload == "always"
    try:
        passed = _pass(wanted, on_host)
    except torch.OutOfMemoryError as error:
        _require_another_way(device, journals, offload, on_host, ranks, error)
        passed = None
    if passed is None:  # outside the handler, whose traceback would keep the memory alive
        progress.finish()
        progress.note(
            f"{device} ran out of memory; continuing with hidden states in host memory, with the "
            "same result"
        )
        if importance is not None:
            importance.forget()
        gc.collect()
        torch.cuda.empty_cache()
        return quantize_blocks(wanted, "always")
    written, perplexity = passed
    if not ranks.is_first:
        return []
    outcomes = [CalibratedOutcome(j.layers, j.scales, perplexity) for j in journals]
    if importance is not None:
        importance.perplexity = perplexity
    outside = _outside(plans, written)
    found = datafree.quantize_some(source, plans, writers, device, progress, outside, wanted.clock)
    for outcome, layers in zip(outcomes, found, strict=True):
        outcome.layers.update(layers)
    for plan, outcome in zip(plans, outcomes, strict=True):
        _check_fallbacks(plan, outcome)
        if plan.recipe.smooths and not outcome.scales:
            progress.note(
                f"warning: {plan.recipe.name} cannot fold scales in this model: no norm or "
                "projection feeds its layers alone; it only rounds"
            )
    return outcomes


@torch.no_grad()
def _pass(wanted: Pass, on_host: bool) -> tuple[frozenset[str], float | None]:
    """Take all streams through all blocks; returns the names of their tensors.

    Also the perplexity of the calibration tokens, on the first rank.
    """
    source, plans, writers, journals = wanted.source, wanted.plans, wanted.writers, wanted.journals
    calibration, device, progress = wanted.calibration, wanted.device, wanted.progress
    importance, ranks = wanted.importance, wanted.ranks
    decoder = Decoder.open(source, device)
    _require_blocks_only(decoder, plans)
    if ranks.size > 1 and (tuned := [p.recipe.name for p in plans if p.recipe.follows_source]):
        raise RecipeError(
            f"recipe {tuned[0]} learns by gradients, which needs a single process; run it without "
            "torchrun, or take a recipe without `tune` and `distil`, and leave out --tune"
        )
    for plan in plans:
        if plan.recipe.distilling_passes and any(p.input_activations for p in plan.recipe.parts):
            raise RecipeError(
                f"recipe {plan.recipe.name} rounds activations, which `distil` does not; leave "
                "`distil` out of its options"
            )
    calibration = calibration.longest_first()
    hidden, calls, padding = _begin(decoder, calibration, ranks)
    if on_host and device.type == "cuda":
        hidden.to_host()
    watcher = wanted.watcher
    streams = streams_of(plans, hidden, importance, watcher is not None, calls)
    _note_untaught(streams, plans, progress)
    start = hidden.branch() if any(plan.recipe.distilling_passes for plan in plans) else None
    del hidden
    followed = probe.Probe()
    done = ranks.share([journal.n_done for journal in journals])
    status = Status(progress, calibration.n_tokens, device)
    progress.start("calibrate", len(decoder.blocks), "blocks")
    visits: list[Visit] = []
    with Delivery() as delivery:
        if ranks.is_first:
            delivery.submit(partial(_copy_others, wanted, decoder.written), 0)
        for index, state in decoder.read_ahead(require_finite):
            fed: Fed = {}
            visits = [
                Visit(
                    decoder,
                    index,
                    state,
                    stream,
                    calls[index],
                    padding,
                    ranks,
                    wanted.shares_experts,
                    fed,
                )
                for stream in streams
            ]
            followed.advance(visits)
            # Several ranks have more to share in the solves of all streams than in those of one.
            for some in [visits] if ranks.size > 1 else [[visit] for visit in visits]:
                for i, result in _quantize(some, wanted, done):
                    if ranks.is_first:
                        finished = FinishedBlock(index, decoder, state, plans[i], result)
                        deliver = partial(finished.deliver, writers[i], journals[i], status)
                        delivery.submit(deliver, finished.tensors.n_bytes)
            progress.advance(1)
    progress.finish()
    if importance is not None:
        importance.add_up(ranks, device)
    states, made = followed.states, followed.quantised_states(visits, plans)
    if not ranks.is_first:
        return decoder.written, None
    if watcher is not None:
        watcher.finish(decoder, calibration)
    if start is not None:
        n_samples = samples_per_batch(device, calibration.ids.shape[1])
        lesson = partial(distil.Lesson, decoder, calls, start.split(n_samples))
        _distil(wanted, streams, n_samples, lesson, calibration)
    return decoder.written, probe.perplexity(decoder, states, made, calibration, progress)


def _outside(plans: Sequence[Plan], written: Collection[str]) -> set[str]:
    """Weights that are quantised and not in any block."""
    return {w.name for p in plans for w in p.quantized.values() if w.name not in written}


def _copy_others(wanted: Pass, written: Collection[str]) -> None:
    """Copy what no recipe changes: early, so that the disk is done with it when the blocks are."""
    others = set(wanted.source.tensors) - set(written) - _outside(wanted.plans, written)
    others -= wanted.copied  # by a pass that ran out of memory
    for tensor in wanted.source.tensors.values():
        takers = [
            writer
            for plan, writer in zip(wanted.plans, wanted.writers, strict=True)
            if tensor.name in plan.names and tensor.name in others
        ]
        if takers:
            copy_tensor(tensor, takers, Silent())
            wanted.copied.add(tensor.name)


def _note_untaught(streams: Sequence[Stream], plans: Sequence[Plan], progress: Progress) -> None:
    """Name the recipes that would learn by gradients and cannot."""
    for stream in streams:
        for plan in (plans[i] for i in stream.indices):
            lacks = plan.recipe.follows_source and stream.source is None
            if lacks and UNTAUGHT not in plan.notes:  # a pass that ran out of memory begins again
                plan.notes.append(UNTAUGHT)
                progress.note(f"{plan.recipe.name}: {UNTAUGHT}")


def _distil(
    wanted: Pass,
    streams: Sequence[Stream],
    n_samples: int,
    lesson: Callable[[HiddenStates, CalibrationTokens], distil.Lesson],
    calibration: CalibrationTokens,
) -> None:
    """Tune the scales of recipes that ask for it on the model's last states."""
    for stream in streams:
        for i in stream.indices:
            plan = wanted.plans[i]
            if not plan.recipe.distilling_passes:
                continue
            if stream.source is None:
                continue  # said when the streams were made
            with wanted.own(i):
                distil.distil(
                    lesson(stream.source.split(n_samples), calibration),
                    plan,
                    wanted.writers[i],
                    wanted.journals[i],
                    wanted.progress,
                )


def _begin(
    decoder: Decoder, calibration: CalibrationTokens, ranks: Ranks
) -> tuple[HiddenStates, list[Call], Padding]:
    """Hidden states of this rank's samples, every block's other arguments, and the padding."""
    n_samples, length = calibration.ids.shape
    usual = samples_per_batch(decoder.device, length)
    if calibration.pictures:
        if ranks.size > 1:
            raise HardwareError(
                f"{calibration.name} has images, which need a single process; run it without "
                "torchrun"
            )
        usual = 1  # images of a sample, however many, go through the model one sample at a time
    mine = calibration.share(ranks.rank, ranks.size)
    batch_size = min(usual, -(-n_samples // ranks.size))
    # A rank without samples uses any to learn the arguments, which are the same for all.
    ids = mine.ids if len(mine.ids) else calibration.ids[:1]
    hidden, calls = decoder.start(
        ids, batch_size, calibration.ids[:usual], _images(decoder.source, calibration, mine)
    )
    if ranks.size > 1 and any(call.carried or call.shared for call in calls):
        raise HardwareError(
            f"{type(decoder.model).__name__} passes more than hidden states between blocks, which "
            "needs a single process; run it without torchrun"
        )
    n = _n_merged(decoder, batch_size * length) if all(call.is_plain for call in calls) else 1
    if n > 1:
        hidden = [torch.cat(hidden[i : i + n]) for i in range(0, len(hidden), n)]
    states = HiddenStates(hidden if len(mine.ids) else [], decoder.device)
    padding = Padding.of(calibration, usual, decoder.device)
    return states, calls, padding.of_share(mine, batch_size, decoder.device, n)


def _n_merged(decoder: Decoder, batch: int) -> int:
    """How many batches of as many tokens go through a block at once."""
    modules = [m for block in decoder.blocks for m in block.modules()]
    widths = {m.in_features for m in modules if isinstance(m, torch.nn.Linear)}
    if not widths or any(isinstance(m, experts.Experts) for m in modules):
        return 1  # a token has a copy for each of its experts
    return n_merged(decoder.device, batch, max(widths), min(widths))


def _images(
    source: ModelSource, calibration: CalibrationTokens, mine: CalibrationTokens
) -> list[dict[str, Any]]:
    """The model's image inputs for these samples; empty where none has any."""
    if not calibration.pictures:
        return []
    vision = Vision.of(source.folder, source.trust_remote_code)
    held = mine if len(mine.ids) else calibration
    found = []
    for ids, pictures in zip(held.ids, held.pictures, strict=True):
        made = vision.inputs(pictures) if pictures else {}
        marks = (ids == vision.token).long()[None] if vision.token is not None else None
        found.append(made | (dict.fromkeys(TYPES, marks) if marks is not None else {}))
    return found


def _quantize(
    visits: Sequence[Visit], wanted: Pass, done: Sequence[int]
) -> Iterator[tuple[int, BlockResult]]:
    """Let every pending recipe of these streams quantise the block, and advance the streams."""
    plans = wanted.plans
    seen: dict[int, tuple[Observation, list[int]]] = {}
    for place, visit in enumerate(visits):
        pending = [i for i in visit.stream.indices if done[i] <= visit.index]
        watcher = None if visit.stream.propagates else wanted.watcher
        if watcher is not None:
            watcher.arrive(visit)
            watcher = watcher if watcher.n_done <= visit.index else None
        if pending or watcher is not None:
            modules = watcher.modules if watcher is not None else ()
            n_samples = watcher.n_samples if watcher is not None else 0
            alone = visit.stream.propagates and pending
            with wanted.own(pending[0]) if alone else nullcontext():
                seen[place] = visit.observe(plans, pending, modules, n_samples), pending
            if watcher is not None:
                watcher.see(visit, seen[place][0])
        else:
            visit.replay(plans, wanted.writers)
    works = {i: found.work(plans[i]) for found, pending in seen.values() for i in pending}
    results = _solved(works, seen.values(), wanted)
    for place, (_, pending) in seen.items():
        for i in pending:
            recipe = plans[i].recipe
            with wanted.own(i):
                tuning.tune(visits[place], works[i], results[i], recipe, recipe.tuning_steps)
    del works
    seen.clear()  # free the statistics before the streams need the memory
    for visit in visits:
        if visit.stream.propagates and visit.stream.indices[0] in results:
            (i,) = visit.stream.indices
            with wanted.own(i):
                visit.proceed(results[i], plans[i].recipe)
    yield from results.items()


def _solved(
    works: Mapping[int, Work], seen: Collection[tuple[Observation, list[int]]], wanted: Pass
) -> dict[int, BlockResult]:
    """Each recipe's result for the block: in one process one after another, so that each is
    timed.
    """
    if wanted.ranks.size > 1:
        solve(list(works.values()), wanted.ranks)
    results = {}
    for found, pending in seen:
        for i in pending:
            with wanted.own(i):
                if wanted.ranks.size == 1:
                    solve([works[i]], wanted.ranks)
                results[i] = found.result(works[i], wanted.plans[i])
    return results


def _require_another_way(
    device: torch.device,
    journals: Sequence[Journal],
    offload: str,
    on_host: bool,
    ranks: Ranks,
    error: torch.OutOfMemoryError,
) -> None:
    """Stop when memory is too small even with hidden states on the host, or retrying is not
    allowed.
    """
    if not (on_host or offload == "never" or ranks.size > 1):
        return
    done = min((journal.n_done for journal in journals), default=0)
    at = f" at block {done + 1}" if ranks.is_first else ""
    last = "--device cpu" if on_host else "--offload auto"
    if ranks.size > 1 and not on_host:
        last = "--offload always"  # the others are in the middle of the block
    raise HardwareError(
        f"{device} ran out of memory{at}; what is finished is kept: run the same command with "
        f"fewer recipes at a time, a shorter --length, or {last}"
    ) from error


def _require_blocks_only(decoder: Decoder, plans: Sequence[Plan]) -> None:
    for plan in plans:
        outside = [
            name
            for name in plan.quantized
            if f"{name}.weight" not in decoder.written and plan.recipe.part(name).learns
        ]
        if outside:
            raise RecipeError(
                f"recipe {plan.recipe.name}: {outside[0]} is outside the decoder blocks, where "
                "calibrated methods do not apply; put it into `ignore`"
            )


def _check_fallbacks(plan: Plan, outcome: CalibratedOutcome) -> None:
    fallen = [name for name, layer in outcome.layers.items() if layer.fallback]
    if len(fallen) > MAX_FALLBACK_SHARE * len(outcome.layers):
        raise MethodError(
            f"recipe {plan.recipe.name}: {len(fallen)} of {len(outcome.layers)} layers could only "
            f"be rounded to nearest, {fallen[0]} first: their inputs are zero or singular; "
            "calibrate on other or more text"
        )
