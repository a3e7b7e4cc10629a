"""The calibrated pass: stream the decoder blocks once, and let every recipe make its checkpoint.

Recipes that do not propagate share one stream of hidden states, the source's own, and one set of
statistics. A recipe that propagates has a stream of its own: it sees its own quantised blocks. So
what a recipe writes does not depend on which others run beside it.

While a block is computed on, the next one is read and the last one is written.
"""

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from quantkit import grid
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import HardwareError, MethodError, RecipeError
from quantkit.export import layers as export_layers
from quantkit.export.folder import FolderWriter
from quantkit.export.manifest import Layer
from quantkit.model.blocks import Decoder
from quantkit.model.shards import DTYPES
from quantkit.model.source import ModelSource
from quantkit.progress import Progress
from quantkit.quantize import feeders, kvcache
from quantkit.quantize.calibrated import BlockResult, quantize_block
from quantkit.quantize.datafree import copy_tensor, require_finite
from quantkit.quantize.delivery import Delivery
from quantkit.quantize.estimate import TOKENS_PER_BATCH
from quantkit.quantize.finished import Finished, Status
from quantkit.quantize.hidden import HiddenStates
from quantkit.quantize.importance import Importance
from quantkit.quantize.journal import Journal
from quantkit.quantize.padding import Keep, Padding, real
from quantkit.quantize.plan import Plan
from quantkit.quantize.statistics import Collector
from quantkit.recipe import Recipe

MAX_FALLBACK_SHARE = 0.01
NOISE = 5
"""Calibration tokens that are this near to guessing are no text."""
SURPRISE_SAMPLES = 2
SURPRISE_TOKENS = 512
TOKENS_REPLAYED = {"cuda": 4096, "cpu": 512}


@dataclass
class Stream:
    """Hidden states on their way through the blocks, and the recipes that learn from them."""

    hidden: HiddenStates
    indices: list[int]
    """Places of the recipes in the run."""
    propagates: bool
    importance: Importance | None = None
    """Watches the source's own stream, if anybody wants to know."""

    @contextmanager
    def watching(self, block: torch.nn.Module, prefix: str, keep: Keep) -> Iterator[None]:
        """Let the forward pass within be seen, at the positions to keep."""
        with self.importance.watching(block, prefix, keep) if self.importance else nullcontext():
            yield


@dataclass
class CalibratedOutcome:
    """What the pass tells of one recipe."""

    layers: dict[str, Layer]
    scales: dict[str, torch.Tensor]
    """Folded scales by name, which a check against the source needs."""
    perplexity: float | None = None
    """Of the calibration tokens."""


def quantize_blocks(
    source: ModelSource,
    plans: Sequence[Plan],
    writers: Sequence[FolderWriter],
    calibration: CalibrationTokens,
    device: torch.device,
    progress: Progress,
    journals: Sequence[Journal],
    offload: str = "auto",
    importance: Importance | None = None,
) -> list[CalibratedOutcome]:
    """Fill every writer with the tensors of the blocks, those apart that a journal has as done.

    `importance` is filled on the way, from the source's own stream.
    """
    on_host = offload == "always"
    arguments = (source, plans, writers, calibration, device, progress, journals)
    try:
        passed = _pass(*arguments, on_host, importance)
    except torch.OutOfMemoryError as error:
        done = min((journal.n_done for journal in journals), default=0)
        if on_host or offload == "never":
            raise HardwareError(
                f"{device} ran out of memory at block {done + 1}; what is finished is kept: run "
                "the same command with fewer recipes at a time, a shorter --length, or "
                + ("--device cpu" if on_host else "--offload auto")
            ) from error
        passed = None
    if passed is None:  # outside of the handler, whose traceback would hold on to the memory
        progress.finish()
        progress.note(
            f"{device} ran out of memory; going on with hidden states in host memory, which "
            "changes nothing in the result"
        )
        if importance is not None:
            importance.forget()
        gc.collect()
        torch.cuda.empty_cache()
        return quantize_blocks(*arguments, "always", importance)
    prefix, perplexity = passed
    outcomes = [CalibratedOutcome(j.layers, j.scales, perplexity) for j in journals]
    if importance is not None:
        importance.perplexity = perplexity
    for tensor in source.tensors.values():
        takers = [
            writer
            for plan, writer in zip(plans, writers, strict=True)
            if tensor.name in plan.names and not tensor.name.startswith(f"{prefix}.")
        ]
        if takers:
            copy_tensor(tensor, takers, progress)
    for plan, outcome in zip(plans, outcomes, strict=True):
        _check_fallbacks(plan, outcome)
    return outcomes


@torch.no_grad()
def _pass(
    source: ModelSource,
    plans: Sequence[Plan],
    writers: Sequence[FolderWriter],
    calibration: CalibrationTokens,
    device: torch.device,
    progress: Progress,
    journals: Sequence[Journal],
    on_host: bool,
    importance: Importance | None,
) -> tuple[str, float | None]:
    """Take all streams through all blocks; returns the prefix of the blocks' names.

    And the perplexity of the calibration tokens.
    """
    decoder = Decoder.open(source, device)
    _require_blocks_only(decoder, plans)
    calibration = calibration.longest_first()
    batch_size = max(1, TOKENS_PER_BATCH[device.type] // calibration.ids.shape[1])
    padding = Padding.of(calibration, batch_size, device)
    hidden, arguments = decoder.start(calibration.ids, batch_size)
    streams = _streams(plans, hidden, device, on_host, importance)
    del hidden
    probe = _Probe.of(streams)
    done = [journal.n_done for journal in journals]
    status = Status(progress, calibration.n_tokens, device)
    progress.start("calibrate", len(decoder.blocks) * len(streams), "blocks")
    with Delivery() as delivery:
        for index, state in decoder.read_ahead(require_finite):
            probe.advance(_Here(decoder, index, state, streams[0], arguments[index], padding))
            for stream in streams:
                here = _Here(decoder, index, state, stream, arguments[index], padding)
                pending = [i for i in stream.indices if done[i] <= index]
                if not pending:
                    _replay(here, plans, writers)
                for i, result in here.quantize(plans, pending).items():
                    finished = Finished(index, here.prefix, state, plans[i], result)
                    delivery.submit(partial(finished.deliver, writers[i], journals[i], status))
                progress.advance(1)
    progress.finish()
    perplexity = _perplexity(decoder, probe, calibration, progress)
    guessing = float(decoder.model.config.vocab_size)
    if perplexity is not None and perplexity > guessing / NOISE:
        progress.note(
            f"warning: the model's perplexity on the calibration tokens is {perplexity:,.0f}, "
            f"where guessing has {guessing:,.0f}: they look like noise to it; are they text, and "
            "of its own tokenizer?"
        )
    return decoder.prefix, perplexity


@dataclass
class _Probe:
    """Some samples on the source's own path, to tell what it makes of them."""

    stream: Stream | None
    """The stream that is on this path ..."""
    own: torch.Tensor | None
    """... or, where every stream propagates, states that are carried along."""

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> "_Probe":
        if not streams[0].propagates:
            return cls(streams[0], None)
        return cls(None, streams[0].hidden.first(SURPRISE_SAMPLES))

    def advance(self, here: "_Here") -> None:
        if self.own is not None:
            self.own = here.run(here.state, self.own)

    @property
    def states(self) -> torch.Tensor:
        if self.own is not None:
            return self.own
        assert self.stream is not None
        return self.stream.hidden.first(SURPRISE_SAMPLES)


def _perplexity(
    decoder: Decoder, probe: _Probe, calibration: CalibrationTokens, progress: Progress
) -> float | None:
    """What the source makes of its calibration tokens: noise is told by it.

    Only advice, so that nothing which goes wrong here stops a run.
    """
    states = probe.states[:, :SURPRISE_TOKENS]
    n_samples, length = states.shape[:2]
    if calibration.lengths is not None:
        length = min(length, int(calibration.lengths[:n_samples].min()))
    if length < 2:
        return None
    try:
        losses = decoder.losses(states[:, :length], calibration.ids[:n_samples, :length])
        mean = float(losses.mean())
    except Exception as error:  # no room for the head, or a family that does it in its own way
        progress.detail(f"the perplexity of the calibration tokens is not known: {error}")
        return None
    return math.exp(min(mean, 700.0)) if math.isfinite(mean) else None


def _streams(
    plans: Sequence[Plan],
    hidden: list[torch.Tensor],
    device: torch.device,
    on_host: bool,
    importance: Importance | None,
) -> list[Stream]:
    shared = [i for i, plan in enumerate(plans) if not plan.recipe.propagates]
    own = [i for i, plan in enumerate(plans) if plan.recipe.propagates]
    states = HiddenStates(hidden, device)
    if on_host and device.type == "cuda":
        states.to_host()
    streams = []
    if shared or importance is not None:
        streams.append(Stream(states.branch(), shared, propagates=False, importance=importance))
    return streams + [Stream(states.branch(), [i], propagates=True) for i in own]


@dataclass
class _Here:
    """One stream at one block."""

    decoder: Decoder
    index: int
    state: dict[str, torch.Tensor]
    stream: Stream
    arguments: dict[str, Any]
    padding: Padding

    @property
    def prefix(self) -> str:
        return f"{self.decoder.name(self.index)}."

    @cached_property
    def samples(self) -> torch.Tensor:
        """Some inputs of the block, to try things on."""
        n_tokens = TOKENS_REPLAYED[self.decoder.device.type]
        return self.stream.hidden.first(self.padding.n_samples(n_tokens))

    def run(self, state: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The block's output with these parameters."""
        with self.decoder.loaded(self.index, state) as block:
            return self.decoder.run(block, hidden, self.arguments)

    def advance(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the stream's hidden states through the block with these parameters."""
        with self.decoder.loaded(self.index, state) as block:
            for place, batch in self.stream.hidden:
                with self.stream.watching(block, self.prefix, self.padding.keep[place]):
                    output = self.decoder.run(block, batch, self.arguments)
                self.stream.hidden.replace(place, output)

    def quantize(self, plans: Sequence[Plan], pending: list[int]) -> dict[int, BlockResult]:
        """Gather statistics, let every pending recipe quantise, and advance the stream."""
        if not pending:
            return {}
        samples = self.samples  # before the stream moves on
        collector, cached, found = self._observe(plans, pending)
        stored = self.decoder.tensors(self.index)
        dtypes = {name: DTYPES[tensor.dtype] for name, tensor in stored.items()}
        results = {}
        for i in pending:
            mine = {
                leader: kept
                for leader, members in collector.groups.items()
                if (kept := [n for n in members if self.prefix + n in plans[i].quantized])
            }
            results[i] = quantize_block(
                self.state,
                dtypes,
                mine,
                collector.statistics,
                found,
                plans[i].recipe,
                _Replay(self, samples),
            )
            results[i].kv_scales = kvcache.scales(cached, results[i], self.prefix, plans[i])
        if self.stream.propagates:
            (result,) = results.values()
            del collector
            self.advance(_quantised_state(self.state, result, plans[pending[0]].recipe))
        return results

    def _observe(
        self, plans: Sequence[Plan], pending: list[int]
    ) -> tuple[Collector, kvcache.Observer, dict[str, feeders.Feeder]]:
        decoder, hidden = self.decoder, self.stream.hidden
        quantised = {name.removeprefix(self.prefix) for i in pending for name in plans[i].quantized}
        with decoder.loaded(self.index, self.state) as block:
            collector = Collector({n: m for n, m in block.named_modules() if n in quantised})
            cached = kvcache.Observer.of(block, [plans[i] for i in pending])
            inputs_only = self.stream.propagates and not cached.attentions
            for place, batch in hidden:
                keep = self.padding.keep[place]
                seen = self.stream.watching(block, self.prefix, keep)
                with collector.watching(keep, inputs_only), cached.watching(keep), seen:
                    output = decoder.run(block, batch, self.arguments)
                if not self.stream.propagates:
                    hidden.replace(place, output)
            del batch, output
            collector.complete()
            _require_finite(decoder.name(self.index), collector)
            if not any(plans[i].recipe.smooths for i in pending):
                return collector, cached, {}
            return (
                collector,
                cached,
                feeders.find(
                    block,
                    collector.groups,
                    lambda: decoder.run(block, self.samples[:1], self.arguments),
                    _head_width(decoder.model.config),
                    self.padding.first(1),
                ),
            )


class _Replay:
    """The squared error of the block's output when some weights are others."""

    def __init__(self, here: _Here, samples: torch.Tensor) -> None:
        self._here = here
        self._samples = samples
        self._keep = here.padding.first(len(samples))

    @cached_property
    def _wanted(self) -> torch.Tensor:
        return self._here.run(self._here.state, self._samples)

    def __call__(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self._here.run(self._here.state | weights, self._samples)
        return real(output - self._wanted, self._keep).float().square().sum()


def _replay(here: _Here, plans: Sequence[Plan], writers: Sequence[FolderWriter]) -> None:
    """Take a stream through a block that was finished before, from what was written of it."""
    after = here.state
    if here.stream.propagates:
        (place,) = here.stream.indices
        after = _stored_state(here.decoder, here.index, plans[place], writers[place])
    here.advance(after)


def _stored_state(
    decoder: Decoder, index: int, plan: Plan, writer: FolderWriter
) -> dict[str, torch.Tensor]:
    prefix = f"{decoder.name(index)}."
    state = {}
    for name in decoder.tensors(index):
        module = (prefix + name).removesuffix(".weight")
        if module not in plan.quantized or not name.endswith(".weight"):
            state[name] = writer.stored(prefix + name).read().to(decoder.device)
            continue
        specs = export_layers.specs(module, plan.quantized[module], plan.recipe)
        parts = {s.name: writer.stored(s.name).read().to(decoder.device) for s in specs}
        quantized = export_layers.read(module, parts, plan.recipe)
        state[name] = grid.dequantize(quantized, plan.recipe.weights)
    return state


def _quantised_state(
    state: dict[str, torch.Tensor], result: BlockResult, recipe: Recipe
) -> dict[str, torch.Tensor]:
    after = state | result.changed
    for name, linear in result.linears.items():
        after[f"{name}.weight"] = grid.dequantize(linear.quantized, recipe.weights)
    return after


def _head_width(config: Any) -> int:
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def _require_blocks_only(decoder: Decoder, plans: Sequence[Plan]) -> None:
    for plan in plans:
        outside = [n for n in plan.quantized if not n.startswith(f"{decoder.prefix}.")]
        if outside:
            raise RecipeError(
                f"recipe {plan.recipe.name}: {outside[0]} lies outside the decoder blocks, where "
                "calibrated methods do not reach; put it into `ignore`"
            )


def _require_finite(name: str, collector: Collector) -> None:
    for linear, statistics in collector.statistics.items():
        if not statistics.gram.diagonal().isfinite().all():  # bounds all other entries
            raise MethodError(
                f"the inputs of {name}.{linear} are not finite on this calibration data; "
                "the source model is damaged, or overflows in this type"
            )


def _check_fallbacks(plan: Plan, outcome: CalibratedOutcome) -> None:
    fallen = [name for name, layer in outcome.layers.items() if layer.fallback]
    if len(fallen) > MAX_FALLBACK_SHARE * len(outcome.layers):
        raise MethodError(
            f"recipe {plan.recipe.name}: {len(fallen)} of {len(outcome.layers)} layers could only "
            f"be rounded to nearest, {fallen[0]} first: their inputs are zero or do not factor; "
            "calibrate on other or more text"
        )
