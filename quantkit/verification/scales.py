"""Scales of activations and of the KV cache, compared with what a model can need.

No weight depends on them, so nothing else finds a wrong one. Layers that read the same input have
the same scale; no activation of a working model is below 2^-16 or above 2^20 everywhere; and with
the source available a few samples show roughly how large activations are.
"""

from collections.abc import Iterator, Mapping

import torch

from quantkit import device as devices
from quantkit import grid, numbers
from quantkit.calibration.reading import python_text
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.architecture import EXPERT
from quantkit.model.block_calls import Call
from quantkit.model.blocks import Decoder
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass import kvcache
from quantkit.onepass.hidden_states import HiddenStates
from quantkit.onepass.streams import Stream
from quantkit.plan.checkpoint import Plan, sharing

SMALLEST, LARGEST = 2.0**-16, 2.0**20
"""Of the largest magnitude that a scale can represent."""
TOO_SMALL, TOO_LARGE = 1 / 4, 16.0
"""A scale relative to that of a few samples: calibration saw more of them, and others."""
N_SAMPLES, LENGTH = 4, 128
INPUTS = (".input_scale", ".input_global_scale")
SHARED = ("weight_global_scale", "weight_scale_2")
"""Per-tensor weight scales, of which vLLM uses one for all layers that it fuses."""


def are_scales(found: torch.Tensor) -> bool:
    """Whether numbers can be scales. Written so that NaN, for which every comparison fails,
    fails.
    """
    return bool((found.isfinite() & (found > 0)).all())


def shape_faults(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """Folded scales that fit no layer."""
    norms = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    for name, scale in checkpoint.scales.items():
        owner, _, kind = name.rpartition(".")
        spec = plan.quantized.get(owner)
        if kind == "folded":
            wanted = norms.get(owner)
            if wanted is not None:  # for a norm, or the columns of a router
                wanted = wanted[-1:]
        elif spec is not None and kind in ("in_scale", "out_scale"):
            wanted = spec.shape[1:] if kind == "in_scale" else spec.shape[:1]
        else:
            wanted = None
        if wanted is None:
            yield f"{name} is a folded scale without a layer"
        elif tuple(scale.shape) != tuple(wanted):
            yield f"{name} has the shape {list(scale.shape)}, it must be {list(wanted)}"
        elif not scale.is_floating_point() or not are_scales(scale):
            yield f"{name} is not finite and positive"


def faults(checkpoint: Checkpoint, plan: Plan, source: ModelSource | None) -> Iterator[str]:
    """Scales that are impossible, or far from what the source's activations need."""
    names = [n for n in checkpoint.tensors if n.endswith(INPUTS)]
    stored = {n: checkpoint.tensors[n].read() for n in (*names, *(s.name for s in plan.kv_scales))}
    sound: dict[str, float] = {}
    for name, scale in stored.items():
        if (scale.numel() != 1 and scale.shape != plan.kv_shape) or not are_scales(scale):
            yield f"{name} is not finite and positive"
            continue
        # Of several heads, the one with the smallest range; the others are no worse off.
        room = _room(checkpoint, plan, name, scale.amin())
        if not SMALLEST <= room <= LARGEST:
            yield f"{name} leaves room for {room:.3g}, more than any activation needs"
            continue
        sound[name] = room
    for name in names:
        module, _, kind = name.rpartition(".")
        others = [f"{other}.{kind}" for other in sharing(module, plan.quantized)]
        if others[0] != name and any(sound.get(o) != sound.get(name) for o in others):
            yield f"{name} is not that of {others[0]}, though both read the same input"
    if source is None or not sound:
        return
    try:
        seen = _largest(source, plan, checkpoint.scales)
    except QuantkitError as error:
        yield f"cannot be compared with the source: {error}"
        return
    for name, room in sound.items():
        if name in seen and not TOO_SMALL * seen[name] <= room <= TOO_LARGE * seen[name]:
            yield f"{name} leaves room for {room:.3g}, and the source's reach {seen[name]:.3g}"


def unequal_scales(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """Layers that vLLM fuses but whose weights have different global scales."""
    for kind in SHARED:
        stored = {
            module: checkpoint.tensors[f"{module}.{kind}"].read()
            for module in plan.quantized
            if f"{module}.{kind}" in checkpoint.tensors
        }
        for module, scale in stored.items():
            first = sharing(module, stored)[0]
            if not torch.equal(scale, stored[first]):
                yield (
                    f"{module}.{kind} is not that of {first}; vLLM fuses them and takes one scale "
                    "for both"
                )


def _room(checkpoint: Checkpoint, plan: Plan, name: str, scale: torch.Tensor) -> float:
    """The largest magnitude that a scale can represent."""
    if not name.endswith(INPUTS):
        one = torch.ones(())
        return float(scale.float() / grid.parameters(-one, one, kvcache.GRID)[0])
    module = name.rpartition(".")[0]
    activations, known = plan.recipe.part(module).input_activations, checkpoint.input_scale(module)
    assert activations is not None
    assert known is not None
    return float(numbers.of(activations).room(known.float()))


@torch.no_grad()
def _largest(
    source: ModelSource, plan: Plan, folded: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """The largest magnitudes of a few samples, by the name of the scale that must cover them."""
    decoder = Decoder.open(source, devices.choose("auto"))
    hidden, calls = decoder.start(_samples(source), N_SAMPLES)
    stream = Stream(HiddenStates(hidden, decoder.device), [], propagates=False)
    found: dict[str, float] = {}
    for index, state in decoder.read_ahead(lambda stored, tensor: None):
        inputs: dict[str, torch.Tensor] = {}
        with decoder.loaded(index, state) as block:
            linears = {
                decoder.module(index, name): module for name, module in block.named_modules()
            }
            handles = [
                linear.register_forward_pre_hook(_watcher(inputs, name))
                for name, linear in linears.items()
                if name in plan.quantized
            ]
            observer = kvcache.Observer.of(block, [plan])
            try:
                with observer.watching():
                    _advance(decoder, block, stream, calls[index])
            finally:
                for handle in handles:
                    handle.remove()
        for module, largest in inputs.items():
            scale = folded.get(f"{module}.in_scale")
            most = float((largest if scale is None else largest / scale).max())
            found |= {f"{module}{kind}": most for kind in INPUTS}
        for attention in observer.keys:
            name = decoder.module(index, attention)
            scale = folded.get(f"{name}.v_proj.out_scale")
            values = observer.values[attention]
            found[f"{name}.k_scale"] = float(observer.keys[attention].max())
            found[f"{name}.v_scale"] = float((values if scale is None else values / scale).max())
    return _over_experts(found)


def _over_experts(found: dict[str, float]) -> dict[str, float]:
    """One value for all experts of a block: their scales are merged, and few samples reach few
    experts.
    """
    largest: dict[str, float] = {}
    kinds = {name: EXPERT.sub(".experts.", name).replace("up_proj", "gate_proj") for name in found}
    for name, kind in kinds.items():
        largest[kind] = max(largest.get(kind, 0.0), found[name])
    return {name: largest[kinds[name]] if EXPERT.search(name) else found[name] for name in found}


def _advance(decoder: Decoder, block: torch.nn.Module, stream: Stream, call: Call) -> None:
    """Take all samples through a block."""
    for place, batch in stream.hidden:
        arguments = stream.arguments(call, place, len(batch), decoder.device)
        output, beside = decoder.run_all(block, batch, arguments)
        if beside:
            stream.beside[place] = beside
        stream.hidden.replace(place, output)


def _watcher(inputs: dict[str, torch.Tensor], module: str):  # type: ignore[no-untyped-def]
    def watch(linear: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        flat = arguments[0].reshape(-1, arguments[0].shape[-1])
        if len(flat):
            largest = flat.abs().amax(0).float()
            known = inputs.get(module)
            inputs[module] = largest if known is None else torch.maximum(known, largest)

    return watch


def _samples(source: ModelSource) -> torch.Tensor:
    """The beginnings of a few texts bundled with Python."""
    tokenizer = load_tokenizer(source.folder, source.trust_remote_code)
    length = min(LENGTH, source.context)
    rows: list[list[int]] = []
    for document in python_text.topics("train"):
        ids = list(tokenizer(document.text)["input_ids"])[:length]
        if len(ids) == length:
            rows.append(ids)
        if len(rows) == N_SAMPLES:
            break
    if not rows:
        raise QuantkitError(f"the tokenizer of {source.folder} makes no sample of {length} tokens")
    return torch.tensor(rows)
