"""One stream at one block: run it, learn from it, and advance the stream.

Where ranks share the samples, each runs its own; the gathered statistics are the same on all.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from quantkit import grid
from quantkit.errors import MethodError
from quantkit.export.folder import FolderWriter
from quantkit.families import geometry
from quantkit.model import experts
from quantkit.model.block_calls import Call
from quantkit.model.blocks import Decoder
from quantkit.model.shards import DTYPES
from quantkit.onepass import feeders, kvcache, stored
from quantkit.onepass.calibrated import Work
from quantkit.onepass.collector import Collector
from quantkit.onepass.padding import Padding, real
from quantkit.onepass.ranks import Ranks
from quantkit.onepass.result import BlockResult
from quantkit.onepass.streams import Stream
from quantkit.plan.checkpoint import Plan
from quantkit.recipe import Recipe

Fed = dict[tuple[tuple[str, ...], ...], dict[str, feeders.Feeder]]
"""What feeds the groups of linears of a block, by the groups."""
TOKENS_REPLAYED = {"cuda": 4096, "cpu": 512}


@dataclass
class Visit:
    """One stream at one block."""

    decoder: Decoder
    index: int
    state: dict[str, torch.Tensor]
    stream: Stream
    call: Call
    padding: Padding
    ranks: Ranks = field(default_factory=Ranks)
    shares_experts: bool = False
    """Experts share the statistics of their common input."""
    fed: Fed = field(default_factory=dict)
    """The block decides that, not the stream: visits of one block share what the first finds."""

    def module(self, name: str) -> str:
        """The name of a module of this block in files."""
        return self.decoder.module(self.index, name)

    @cached_property
    def samples(self) -> torch.Tensor:
        """Some inputs of the block for trials; the same on every rank."""
        return self.first(self.padding.n_samples(TOKENS_REPLAYED[self.decoder.device.type]))

    @cached_property
    def sample_arguments(self) -> dict[str, Any]:
        """The block's arguments for them."""
        return self.first_arguments(len(self.samples))

    def first(self, n_samples: int) -> torch.Tensor:
        """The first samples of all ranks."""
        n_samples = min(n_samples, len(self.padding.lengths))
        return self.ranks.first_samples(n_samples, self.stream.hidden.first)

    def first_arguments(self, n_samples: int) -> dict[str, Any]:
        """The block's arguments for the first samples, before the stream advances."""
        return self.stream.first_arguments(self.call, n_samples, self.decoder.device)

    def run(
        self, state: Mapping[str, torch.Tensor], hidden: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """The block's output with these parameters."""
        with self.decoder.loaded(self.index, state) as block:
            return self.decoder.run(block, hidden, arguments)

    def advance(self, state: Mapping[str, torch.Tensor]) -> None:
        """Advance the stream's hidden states through the block with these parameters."""
        with self.decoder.loaded(self.index, state) as block:
            for place, batch in self.stream.hidden:
                with self.stream.watching(block, self.module, self.padding.keep[place]):
                    output = self._pass(block, place, batch)
                self.stream.hidden.replace(place, output)

    def _pass(
        self, block: torch.nn.Module, place: int, batch: torch.Tensor, goes_on: bool = True
    ) -> torch.Tensor:
        """Run a batch through the block; what it returns besides states is kept for the
        next one.
        """
        arguments = self.stream.arguments(self.call, place, len(batch), self.decoder.device)
        output, beside = self.decoder.run_all(block, batch, arguments)
        if goes_on and beside:
            self.stream.beside[place] = beside
        return output

    def observe(
        self,
        plans: Sequence[Plan],
        pending: Sequence[int],
        also: Container[str] = (),
        n_raw_inputs: int = 0,
    ) -> "Observation":
        """Gather statistics for the pending recipes; a stream that does not propagate advances.

        Those of modules in `also` are gathered too; `n_raw_inputs` raw inputs of each are kept.
        """
        decoder, hidden = self.decoder, self.stream.hidden
        smooths = any(plans[i].recipe.smooths for i in pending)
        samples, arguments, alone = None, {}, {}
        if smooths:  # before the stream advances
            samples, arguments = self.samples, self.sample_arguments
            alone = self.first_arguments(1)
        quantised = {name for i in pending for name in plans[i].quantized}
        with decoder.loaded(self.index, self.state) as block:
            linears = {
                name: module
                for name, module in block.named_modules()
                if isinstance(module, torch.nn.Linear)
                and ((full := self.module(name)) in quantised or full in also)
            }
            routed = {n: m for n, m in block.named_modules() if isinstance(m, experts.Experts)}
            holds_out = any(plans[i].recipe.holds_out for i in pending)
            collector = Collector(
                linears,
                routed if smooths else {},
                holds_out,
                n_raw_inputs,
                self.shares_experts,
            )
            cached = kvcache.Observer.of(block, [plans[i] for i in pending])
            inputs_only = self.stream.propagates and not cached.attentions
            for place, batch in self._beside_source(block):
                keep = self.padding.keep[place]
                seen = self.stream.watching(block, self.module, keep)
                watched = experts.watched(block, keep)
                with collector.watching(keep, inputs_only), cached.watching(keep), seen, watched:
                    output = self._pass(block, place, batch, not self.stream.propagates)
                if not self.stream.propagates:
                    hidden.replace(place, output)
                del batch, output
            collector.complete(self.ranks)
            cached.add_up(self.ranks, decoder.device)
            self._require_met(collector, quantised)
            _require_finite(decoder.name(self.index), collector)
            found: dict[str, feeders.Feeder] = {}
            if samples is not None:
                groups = tuple((leader, *names) for leader, names in collector.groups.items())
                if groups not in self.fed:
                    one = samples[:1]
                    made = feeders.find(
                        block,
                        collector.groups,
                        lambda: decoder.run(block, one, alone),
                        _head_width(block, decoder.model.config.get_text_config()),
                        self.padding.first(1),
                    )
                    self.fed[groups] = self.ranks.share(made)
                found = self.fed[groups]
        return Observation(self, collector, cached, found, samples, arguments)

    def _require_met(self, collector: Collector, quantised: Container[str]) -> None:
        """Every layer that a recipe rounds by data must have seen some."""
        met = {name for members in collector.groups.values() for name in members}
        for name in collector.linears:
            if name not in met and self.module(name) in quantised:
                raise MethodError(
                    f"no calibration token reaches {self.module(name)}, so nothing says how to "
                    "round it; give more or other data, put it into the recipe's `ignore`, or "
                    "take a recipe that needs no data"
                )

    def _beside_source(self, block: torch.nn.Module) -> Iterator[tuple[int, torch.Tensor]]:
        """Indices and batches of the stream; the source's own run through the block before each."""
        source = self.stream.source
        if source is None:
            yield from self.stream.hidden
            return
        for (place, own), (_, batch) in zip(source, self.stream.hidden, strict=True):
            arguments = self.call.of_batch(place, len(own), self.decoder.device)
            source.replace(place, self.decoder.run(block, own, arguments))
            yield place, batch

    def replay(self, plans: Sequence[Plan], writers: Sequence[FolderWriter]) -> None:
        """Advance through a block that was finished before, using what was written for it."""
        after: dict[str, torch.Tensor] = self.state
        if self.stream.propagates:
            (place,) = self.stream.indices
            found = self._stored(plans[place], writers[place]) if self.ranks.is_first else None
            after = self.ranks.share(found)
        if self.stream.source is not None:
            with self.decoder.loaded(self.index, self.state) as block:
                for _ in self._beside_source(block):
                    pass
        self.advance(after)

    def _stored(self, plan: Plan, writer: FolderWriter) -> dict[str, torch.Tensor]:
        block = stored.read_block(self.decoder, self.index, plan, writer)
        return stored.dequantized(self.decoder, self.index, plan, block)

    def proceed(self, result: BlockResult, recipe: Recipe) -> None:
        """Advance a propagating stream with its recipe's result for the block."""
        self.advance(self.after(result, recipe))

    def after(self, result: BlockResult, recipe: Recipe) -> dict[str, torch.Tensor]:
        """The block's parameters as a recipe leaves them."""
        after = self.state | result.changed
        for name, linear in result.linears.items():
            scheme = recipe.part(self.module(name)).weights
            after[f"{name}.weight"] = grid.dequantize(linear.quantized, scheme)
        return after


@dataclass
class Observation:
    """What a visit has seen of its block."""

    visit: Visit
    collector: Collector
    cached: kvcache.Observer
    feeders: dict[str, feeders.Feeder]
    samples: torch.Tensor | None
    """Inputs to try scales on, where a recipe needs them ..."""
    arguments: dict[str, Any]
    """... and the block's arguments for them."""

    def work(self, plan: Plan) -> Work:
        """A recipe's work at this block."""
        visit = self.visit
        tensors = visit.decoder.tensors(visit.index)
        mine = {
            leader: kept
            for leader, members in self.collector.groups.items()
            if (kept := [n for n in members if visit.module(n) in plan.quantized])
        }
        return Work(
            visit.state,
            {name: DTYPES[tensor.dtype] for name, tensor in tensors.items()},
            mine,
            self.collector.statistics,
            self.feeders,
            {n: plan.recipe.part(visit.module(n)) for names in mine.values() for n in names},
            None if self.samples is None else Replay(visit, self.samples, self.arguments),
        )

    def result(self, work: Work, plan: Plan) -> BlockResult:
        """A recipe's result, once its work is solved."""
        work.result.kv_scales = kvcache.scales(self.cached, work.result, self.visit.module, plan)
        return work.result


class Replay:
    """The squared error of the block's output when some weights are replaced."""

    def __init__(self, visit: Visit, samples: torch.Tensor, arguments: dict[str, Any]) -> None:
        self._visit = visit
        self._samples = samples
        self._arguments = arguments
        self._keep = visit.padding.first(len(samples))

    @cached_property
    def _wanted(self) -> torch.Tensor:
        return self._visit.run(self._visit.state, self._samples, self._arguments)

    def __call__(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        state = self._visit.state | weights
        output = self._visit.run(state, self._samples, self._arguments)
        return real(output - self._wanted, self._keep).float().square().sum()


def _require_finite(name: str, collector: Collector) -> None:
    for linear, statistics in collector.statistics.items():
        if not statistics.gram.diagonal().isfinite().all():  # bounds all other entries
            raise MethodError(
                f"the inputs of {name}.{linear} are not finite on this calibration data; "
                "the source model is damaged, or overflows in this type"
            )


def _head_width(block: torch.nn.Module, config: Any) -> int:
    """Columns per attention head, which may differ between blocks of a model."""
    own = (getattr(module, "head_dim", None) for module in block.modules())
    found = next((width for width in own if isinstance(width, int)), None)
    return found or geometry.head_dim(geometry.of_object(config))
