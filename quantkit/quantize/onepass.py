"""The calibrated pass: stream the decoder blocks once, and let every recipe make its checkpoint.

Recipes that do not propagate share one stream of hidden states, the source's own, and one set of
statistics. A recipe that propagates has a stream of its own: it sees its own quantised blocks. So
what a recipe writes does not depend on which others run beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit import grid
from quantkit.errors import MethodError, RecipeError
from quantkit.export import compressed_tensors
from quantkit.export.folder import FolderWriter
from quantkit.export.manifest import Layer
from quantkit.model.blocks import Decoder
from quantkit.model.shards import DTYPES
from quantkit.model.source import ModelSource
from quantkit.progress import Progress
from quantkit.quantize import feeders, kvcache
from quantkit.quantize.calibrated import BlockResult, LinearResult, quantize_block
from quantkit.quantize.datafree import copy_tensor, require_finite
from quantkit.quantize.journal import Journal
from quantkit.quantize.plan import Plan
from quantkit.quantize.statistics import Collector
from quantkit.recipe import Recipe

MAX_FALLBACK_SHARE = 0.01
TOKENS_PER_BATCH = {"cuda": 16384, "cpu": 2048}


@dataclass
class Stream:
    """Hidden states on their way through the blocks, and the recipes that learn from them."""

    hidden: list[torch.Tensor]
    indices: list[int]
    """Places of the recipes in the run."""
    propagates: bool


@dataclass
class CalibratedOutcome:
    """What the pass tells of one recipe."""

    layers: dict[str, Layer]
    scales: dict[str, torch.Tensor]
    """Folded scales by name, which a check against the source needs."""


@torch.no_grad()
def quantize_blocks(
    source: ModelSource,
    plans: Sequence[Plan],
    writers: Sequence[FolderWriter],
    tokens: torch.Tensor,
    device: torch.device,
    progress: Progress,
    journals: Sequence[Journal],
) -> list[CalibratedOutcome]:
    """Fill every writer with the tensors of the blocks, those apart that a journal has as done."""
    decoder = Decoder.open(source, device)
    _require_blocks_only(decoder, plans)
    batch_size = max(1, TOKENS_PER_BATCH[device.type] // tokens.shape[1])
    hidden, arguments = decoder.start(tokens, batch_size)
    streams = _streams(plans, hidden)
    n_blocks = len(decoder.blocks)
    progress.start("calibrate", n_blocks * len(streams), "blocks")
    for index in range(n_blocks):
        state = decoder.read(index)
        for name, tensor in decoder.tensors(index).items():
            require_finite(tensor, state[name])
        for stream in streams:
            pending = [i for i in stream.indices if journals[i].n_done <= index]
            if pending:
                results = _run_block(
                    decoder, index, state, stream, pending, plans, arguments[index]
                )
            else:
                results = {}
                _replay(decoder, index, state, stream, plans, writers, arguments[index])
            for place, result in results.items():
                written = _write(decoder, index, plans[place], writers[place], result)
                writers[place].flush()
                layers, scales = _record(decoder, index, plans[place], state, result, progress)
                journals[place].record(index, layers, scales, written)
            progress.advance(1)
    progress.finish()
    outcomes = [CalibratedOutcome(journal.layers, journal.scales) for journal in journals]
    for tensor in source.tensors.values():
        takers = [
            writer
            for plan, writer in zip(plans, writers, strict=True)
            if tensor.name in plan.names and not tensor.name.startswith(f"{decoder.prefix}.")
        ]
        if takers:
            copy_tensor(tensor, takers, progress)
    for plan, outcome in zip(plans, outcomes, strict=True):
        _check_fallbacks(plan, outcome)
    return outcomes


def _streams(plans: Sequence[Plan], hidden: list[torch.Tensor]) -> list[Stream]:
    shared = [i for i, plan in enumerate(plans) if not plan.recipe.propagates]
    own = [i for i, plan in enumerate(plans) if plan.recipe.propagates]
    streams = [Stream(list(hidden), shared, propagates=False)] if shared else []
    return streams + [Stream(list(hidden), [i], propagates=True) for i in own]


def _run_block(
    decoder: Decoder,
    index: int,
    state: dict[str, torch.Tensor],
    stream: Stream,
    pending: list[int],
    plans: Sequence[Plan],
    arguments: dict[str, Any],
) -> dict[int, BlockResult]:
    prefix = f"{decoder.name(index)}."
    linears = {name.removeprefix(prefix) for i in pending for name in plans[i].quantized} & {
        name for name, _ in decoder.blocks[index].named_modules()
    }
    with decoder.loaded(index, state) as block:
        modules = {n: m for n, m in block.named_modules() if n in linears}
        collector = Collector(modules)
        cached = kvcache.Observer.of(block, [plans[i] for i in pending])
        for place, batch in enumerate(stream.hidden):
            with collector.watching(), cached.watching():
                output = decoder.run(block, batch, arguments)
            if not stream.propagates:
                stream.hidden[place] = output
        _require_finite(decoder.name(index), collector)
        needs = any(plans[i].recipe.smooths for i in pending)
        found = (
            feeders.find(
                block,
                collector.groups,
                lambda: decoder.run(block, stream.hidden[0][:1], arguments),
                _head_width(decoder.model.config),
            )
            if needs
            else {}
        )
    dtypes = {name: DTYPES[t.dtype] for name, t in decoder.tensors(index).items()}
    results = {}
    for i in pending:
        mine = {
            leader: kept
            for leader, members in collector.groups.items()
            if (kept := [n for n in members if prefix + n in plans[i].quantized])
        }
        results[i] = quantize_block(
            state, dtypes, mine, collector.statistics, found, plans[i].recipe
        )
        results[i].kv_scales = kvcache.scales(cached, results[i], prefix, plans[i])
    if stream.propagates:
        (result,) = results.values()
        after = _quantised_state(state, result, plans[stream.indices[0]].recipe)
        _advance(decoder, index, after, stream, arguments)
    return results


def _advance(
    decoder: Decoder,
    index: int,
    state: dict[str, torch.Tensor],
    stream: Stream,
    arguments: dict[str, Any],
) -> None:
    """Take a stream's hidden states through a block with these parameters."""
    with decoder.loaded(index, state) as block:
        for place, batch in enumerate(stream.hidden):
            stream.hidden[place] = decoder.run(block, batch, arguments)


def _replay(
    decoder: Decoder,
    index: int,
    state: dict[str, torch.Tensor],
    stream: Stream,
    plans: Sequence[Plan],
    writers: Sequence[FolderWriter],
    arguments: dict[str, Any],
) -> None:
    """Take a stream through a block that was finished before, from what was written of it."""
    after = state
    if stream.propagates:
        (place,) = stream.indices
        after = _stored_state(decoder, index, plans[place], writers[place])
    _advance(decoder, index, after, stream, arguments)


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
        specs = compressed_tensors.specs(module, plan.quantized[module], plan.recipe)
        parts = {s.name: writer.stored(s.name).read().to(decoder.device) for s in specs}
        quantized = compressed_tensors.read(module, parts, plan.recipe)
        state[name] = grid.dequantize(quantized, plan.recipe.weights)
    return state


def _quantised_state(
    state: dict[str, torch.Tensor], result: BlockResult, recipe: Recipe
) -> dict[str, torch.Tensor]:
    after = state | result.changed
    for name, linear in result.linears.items():
        after[f"{name}.weight"] = grid.dequantize(linear.quantized, recipe.weights)
    return after


def _write(
    decoder: Decoder, index: int, plan: Plan, writer: FolderWriter, result: BlockResult
) -> list[str]:
    """Write all tensors of a block; returns their names."""
    prefix = f"{decoder.name(index)}."
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in result.linears.items():
        tensors |= compressed_tensors.tensors(
            prefix + name, linear.quantized, plan.recipe, linear.input_scale
        )
    tensors |= result.kv_scales
    done = {f"{name}.weight" for name in result.linears}
    for name, stored in decoder.tensors(index).items():
        if name not in done:
            changed = result.changed.get(name)
            tensors[prefix + name] = stored.read() if changed is None else changed
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    return list(tensors)


def _record(
    decoder: Decoder,
    index: int,
    plan: Plan,
    state: dict[str, torch.Tensor],
    result: BlockResult,
    progress: Progress,
) -> tuple[dict[str, Layer], dict[str, torch.Tensor]]:
    """What is to be told of a block's layers, and the scales that were folded."""
    prefix = f"{decoder.name(index)}."
    layers: dict[str, Layer] = {}
    scales = {f"{prefix}{n}.folded": scale for n, scale in result.folded.items()}
    for name, linear in result.linears.items():
        original = state[f"{name}.weight"].float()
        change = undone(linear, plan) - original
        norm = torch.linalg.vector_norm(original).clamp(min=1e-30)
        error = (torch.linalg.vector_norm(change) / norm).item()
        if not error < float("inf"):
            raise MethodError(f"{plan.recipe.method} gave non-finite values for {prefix}{name}")
        layers[prefix + name] = Layer(
            relative_error=error,
            output_error=linear.output_error,
            damping=linear.damping,
            fallback=linear.fallback,
        )
        if linear.in_scale is not None:
            scales[f"{prefix}{name}.in_scale"] = linear.in_scale
        if linear.out_scale is not None:
            scales[f"{prefix}{name}.out_scale"] = linear.out_scale
        progress.detail(
            f"{plan.recipe.name}: {prefix}{name} output error {linear.output_error:.2e}"
        )
    return layers, {name: scale.float().cpu().contiguous() for name, scale in scales.items()}


def undone(linear: LinearResult, plan: Plan) -> torch.Tensor:
    """The weight that the numbers stand for, with folded scales taken back."""
    weight = grid.dequantize(linear.quantized, plan.recipe.weights)
    return grid.unfold(weight, linear.in_scale, linear.out_scale)


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
        if not statistics.gram.isfinite().all():
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
