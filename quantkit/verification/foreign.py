"""Every check of a checkpoint made by other tools, of which only its config is known.

The stored tensors are compared with what the config declares, layer by layer, the numbers with what
they can be, and, if the source is available, each layer's error with what such numbers cost.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quantkit import grid, numbers
from quantkit.dispatch.scales import NAN_WORDS
from quantkit.errors import QuantkitError
from quantkit.export.foreign import ForeignCheckpoint, likeness
from quantkit.formats import declared
from quantkit.formats.declared import Declared, Part, Weights
from quantkit.model import bitsandbytes, dequantized
from quantkit.model.architecture import Architecture
from quantkit.model.shards import StoredTensor
from quantkit.model.source import ModelSource, read_config, read_tensors
from quantkit.plan.checkpoint import check_tied, fused_with, sharing
from quantkit.progress import Progress, Silent
from quantkit.verification import joint, side_files
from quantkit.verification.checkpoint import Verification
from quantkit.verification.scales import SHARED

SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales")
INPUTS = ("input_scale", "input_global_scale")
LARGEST = ("SCB", "weight.absmax", "weight.nested_absmax")
"""Largest magnitudes, which bitsandbytes stores: zero where all weights are."""
STANDS_OUT = 3.0
"""Times the median of all layers with the same number format."""
NEGLIGIBLE = 0.01
"""Change of a parameter that is not quantised: another 16-bit dtype."""


@dataclass(frozen=True)
class _Files:
    """A folder's tensors, and what the config says about them."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    declared: Declared
    section: Mapping[str, Any]
    architecture: Architecture

    @cached_property
    def quantized(self) -> list[str]:
        """Layers of the model that are not stored in 16 bits."""
        return [m for m in dequantized.modules(self.tensors) if m in self.architecture.linears]

    @cached_property
    def beyond(self) -> list[str]:
        """Quantised layers that the model, as transformers builds it, does not have."""
        linears = self.architecture.linears
        return [m for m in dequantized.modules(self.tensors) if m not in linears]

    @cached_property
    def joint(self) -> list[joint.Joint]:
        """Parameters of all experts of a block, where the method stores them together."""
        return joint.of(self.architecture) if self.declared.dialect.joins_experts else []

    @cached_property
    def jointly(self) -> set[str]:
        """The layers that those hold."""
        return {layer for one in self.joint for layer in one.layers()}

    def tensor(self, module: str, part: str) -> StoredTensor | None:
        return self.tensors.get(f"{module}.{part}")


def verify(
    path: Path,
    source: ModelSource | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    read_weights: bool = True,
) -> Verification:
    """Check a folder; without `read_weights` its config and headers only."""
    progress = progress or Silent()
    result = Verification(path)
    config = read_config(path)
    found = declared.of(config, str(path))
    try:
        tensors = read_tensors(path)
        result.record("headers", [])
    except QuantkitError as error:
        result.record("headers", [str(error)])
        return result
    architecture = Architecture.of(path, trust_remote_code)
    files = _Files(path, tensors, found, declared.section(config), architecture)
    result.record(f"config ({found.words})", list(_config_faults(files)))
    wrong = list(_tensor_faults(files))
    result.record("tensors", wrong)
    if files.beyond:
        result.left_out.append(
            f"{len(files.beyond)} layers that transformers does not build, such as "
            f"{files.beyond[0]}: their shapes are not known"
        )
    result.record("layers that engines fuse", list(_fused_faults(files)))
    faults = list(side_files.tokenizer_faults(path, trust_remote_code))
    result.record("tokenizer", faults)
    if not read_weights:
        return result
    result.record("scales", list(_scale_faults(files)))
    if wrong:
        result.left_out.append("weights: not read back, since the tensors are wrong")
        return result
    try:
        opened = ModelSource.open(str(path), None, trust_remote_code, requantize=True)
        foreign = ForeignCheckpoint.of(opened)
        result.record("tied head", list(_tied_faults(foreign, architecture)))
    except QuantkitError as error:
        result.record("weights", [str(error)])
        return result
    _weights(foreign, files, source, result, progress)
    return result


def _config_faults(files: _Files) -> Iterator[str]:
    """Layers that are stored differently from what the config declares."""
    known = files.declared
    stray = [e for e in known.ignore if not e.startswith("re:") and not _names(files, e)]
    hint = f"; `ignore` has {stray[0]}, which is not a module of this model" if stray else ""
    tied = {name.removesuffix(".weight") for name in files.architecture.tied}
    never = {*files.architecture.never, files.architecture.head}
    for module in files.architecture.linears:
        entry, part = known.ignores(module), known.part(module)
        if module in files.quantized:
            if entry is not None:
                yield f"{module} is stored quantised, and `ignore` has {entry}"
            elif part is None:
                yield f"{module} is stored quantised, but no group of the config covers it"
        elif entry is None and part is not None and known.dialect.by_config:
            by_default = not known.dialect.spells_out and module in never
            if module not in tied and not by_default:
                yield f"{module} is stored in 16 bits, and declared as {part.label}{hint}"


def _names(files: _Files, entry: str) -> bool:
    """Whether an entry of `ignore` names a module, or a part of the model that contains it."""
    modules = {name.rpartition(".")[0] for name in files.architecture.shapes}
    modules.update(files.architecture.linears, files.architecture.never, ("lm_head",))
    return any(
        files.declared.means(entry, module) or module.startswith(f"{entry}.") for module in modules
    )


def _tensor_faults(files: _Files) -> Iterator[str]:
    """Tensors that are missing, or have another shape than the declared numbers need."""
    known = files.architecture
    quantized = set(files.quantized)
    for name, shape in known.shapes.items():
        stored = files.tensors.get(name)
        module, _, kind = name.rpartition(".")
        if module in files.jointly or (module in quantized and kind == "weight"):
            continue
        if stored is None:
            if name not in known.tied:
                yield f"{name} is missing"
        elif stored.shape != tuple(shape):
            yield f"{name} is {list(stored.shape)}, it must be {list(shape)}"
    for one in files.joint:
        yield from joint.tensor_faults(one, files.tensors)
    for module in files.quantized:
        part = files.declared.part(module)
        if part is None or module in files.jointly:
            continue
        expected = _expected(files, module, part, *known.linears[module])
        for name, shapes in expected.items():
            found = files.tensor(module, name)
            if found is None:
                yield f"{module}.{name} is missing"
            elif shapes and found.shape not in shapes:
                yield (
                    f"{module}.{name} is {list(found.shape)}, {part.label} needs {list(shapes[0])}"
                )
        name, declared = _declared_shape(files, module)
        if declared is not None and declared != known.linears[module]:
            yield f"{name} says {list(declared)}, not {list(known.linears[module])}"


def _declared_shape(files: _Files, module: str) -> tuple[str, tuple[int, ...] | None]:
    """The shape stated by a tensor next to a packed weight, and that tensor's name."""
    shape_of = files.tensor(module, "weight_shape")
    if shape_of is not None and shape_of.shape == (2,):
        return shape_of.name, tuple(shape_of.read().tolist())
    name = bitsandbytes.state_name(f"{module}.weight", files.tensors)
    return (name, bitsandbytes.read_state(files.tensors[name]).shape) if name else ("", None)


Shapes = tuple[tuple[int, ...], ...]


def _expected(files: _Files, module: str, part: Part, rows: int, columns: int) -> dict[str, Shapes]:
    """The tensors of a layer and the shapes that each may have; empty: any."""
    weights = part.weights
    if weights.kind:
        return _of_bitsandbytes(files, module, weights, rows, columns)
    groups = -(-columns // weights.group_size) if weights.group_size else 1
    scales: Shapes = ((rows, groups), *(((rows,),) if groups == 1 else ()))
    if weights.strategy == "tensor":
        scales = ((1,), (), (1, 1), (rows, 1), (rows,))
    elif weights.strategy == "block":
        high, wide = _blocks(files.section)
        scales = ((-(-rows // high), -(-columns // wide)),)
    per = 32 // weights.num_bits
    is_dense = 32 % weights.num_bits == 0
    if files.tensor(module, "qweight") is not None:
        if declared.packs_rows(files.section):
            words: Shapes = ((columns, -(-rows // per)),)
        else:
            words = ((-(-columns // per), rows),)
        zeros: Shapes = ((groups, -(-rows // per)),)
        found = {"qweight": words, "qzeros": zeros, "scales": ((groups, rows),)}
        return found if is_dense else dict.fromkeys(found, ())
    if (packed := files.tensor(module, "weight_packed")) is not None and packed.dtype == "I32":
        found = {
            "weight_packed": ((rows, -(-columns // per)),) if is_dense else (),
            "weight_scale": scales,
            "weight_shape": ((2,),),
        }
        if not weights.symmetric:
            found["weight_zero_point"] = ((-(-rows // per), groups),) if is_dense else ()
        return found
    name = "weight" if packed is None else "weight_packed"
    halved = weights.num_bits == 4
    scale = "weight_scale_inv" if files.tensor(module, "weight_scale_inv") else "weight_scale"
    found = {name: ((rows, columns // 2 if halved else columns),), scale: scales}
    if weights.strategy == "tensor_group":
        found["weight_scale_2" if packed is None else "weight_global_scale"] = ((1,), ())
    if part.inputs is not None and part.inputs.is_static:
        nvfp4 = part.inputs.strategy == "tensor_group" and packed is not None
        found["input_global_scale" if nvfp4 else "input_scale"] = ((1,), (), (1, 1))
    return found


def _of_bitsandbytes(
    files: _Files, module: str, weights: Weights, rows: int, columns: int
) -> dict[str, Shapes]:
    """The block sizes are stored with each weight."""
    if weights.num_bits == 8:
        return {"weight": ((rows, columns),), "SCB": ((rows,), (rows, 1))}
    found: dict[str, Shapes] = {
        "weight": ((-(-rows * columns // 2), 1),),
        "weight.quant_map": ((16,),),
    }
    name = bitsandbytes.state_name(f"{module}.weight", files.tensors)
    if name is None:
        kind = weights.kind.rpartition(" ")[2].lower()
        return found | {f"weight.{bitsandbytes.STATE}{kind}": ()}
    state = bitsandbytes.read_state(files.tensors[name])
    n_blocks = -(-rows * columns // state.block_size)
    found["weight.absmax"] = ((n_blocks,),)
    if state.nested_block_size:
        found["weight.nested_absmax"] = ((-(-n_blocks // state.nested_block_size),),)
        found["weight.nested_quant_map"] = ((256,),)
    return found


def _blocks(section: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of an FP8 block."""
    groups = section.get("config_groups")
    named = [group.get("weights") or {} for group in groups.values()] if groups else []
    block = section.get("weight_block_size")
    block = block or next((w["block_structure"] for w in named if w.get("block_structure")), None)
    high, wide = block or (128, 128)
    return int(high), int(wide)


def _fused_faults(files: _Files) -> Iterator[str]:
    """Layers that vLLM fuses but that differ."""
    linears = files.architecture.linears
    for module in linears:
        group = fused_with(module, linears)
        if len(group) < 2 or group[0] != module:
            continue
        kinds = {name: _kind(files, name) for name in group}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name.rpartition('.')[2]} {kind}" for name, kind in kinds.items())
            yield f"{module} and layers that vLLM fuses with it have different schemes: {listed}"


def _kind(files: _Files, module: str) -> str:
    if module not in files.quantized:
        return "in 16 bits"
    part = files.declared.part(module)
    return "in undeclared numbers" if part is None else part.label


def _scale_faults(files: _Files) -> Iterator[str]:
    """Scales that no quantiser writes, and unequal ones where an engine uses only one."""
    for module in dequantized.modules(files.tensors):
        for name in (*SCALES, *INPUTS):
            stored = files.tensor(module, name)
            if stored is not None and (words := impossible(stored.read())):
                is_group = stored.dtype == "F8_E4M3" and "NaN" in words
                yield f"{module}.{name}: {words}{f'; {NAN_WORDS}' if is_group else ''}"
        for name in LARGEST:
            stored = files.tensor(module, name)
            if stored is None or stored.dtype != "F32":
                continue
            if words := impossible(stored.read(), may_be_zero=True):
                yield f"{module}.{name}: {words}"
    for stored in joint.scales(files.tensors):
        if words := impossible(stored.read()):
            yield f"{stored.name}: {words}"
    for kind in SHARED:
        stored_by = {m: t.read() for m in files.quantized if (t := files.tensor(m, kind))}
        for module, scale in stored_by.items():
            first = sharing(module, stored_by)[0]
            if not torch.equal(scale, stored_by[first]):
                yield (
                    f"{module}.{kind} is not that of {first}; vLLM fuses them and takes one scale "
                    "for both"
                )


def impossible(scale: torch.Tensor, may_be_zero: bool = False) -> str:
    """What is wrong with scales, in words; empty where nothing is.

    Zero, or nearly so, is the scale of an empty group in E4M3; in wider dtypes it is damage.
    """
    if not scale.is_floating_point():
        bad = scale == 255 if scale.dtype == torch.uint8 else torch.zeros_like(scale).bool()
        return _counted(bad, "NaN (E8M0)")
    wide = scale.float()
    kinds = [("NaN", wide.isnan()), ("infinite", wide.isinf()), ("negative", wide < 0)]
    if scale.element_size() > 1 and not may_be_zero:
        kinds.append(("zero", wide == 0))
        if scale.dtype != torch.float16:
            tiny = torch.finfo(scale.dtype).tiny
            kinds.append(("denormal", (wide > 0) & (wide < tiny)))
    return "; ".join(words for kind, bad in kinds if (words := _counted(bad, kind)))


def _counted(bad: torch.Tensor, kind: str) -> str:
    n = int(bad.sum())
    return f"{n:,} of {bad.numel():,} scales {'is' if n == 1 else 'are'} {kind}" if n else ""


def _tied_faults(foreign: ForeignCheckpoint, architecture: Architecture) -> Iterator[str]:
    for name in architecture.tied:
        if name.removesuffix(".weight") in foreign.layers:
            yield f"{name} is stored quantised, and config.json ties it to the embedding"
    try:
        check_tied(foreign, architecture)
    except QuantkitError as error:
        yield str(error)


@torch.no_grad()
def _weights(
    foreign: ForeignCheckpoint,
    files: _Files,
    source: ModelSource | None,
    result: Verification,
    progress: Progress,
) -> None:
    """Whether all numbers are finite and, with the source, close to the original weights."""
    if source is not None:
        unlike = likeness(foreign) != likeness(source)
        fault = f"{source.name} is {likeness(source)}, and this is {likeness(foreign)}"
        result.record("source", [fault] if unlike else [])
        source = None if unlike else source
    else:
        result.left_out.append("comparison with the source: give it with --source")
    progress.start(f"verify {files.path.name}", foreign.size_bytes)
    faults: list[str] = []
    errors: dict[str, float] = {}
    folded = source is not None and _is_folded(foreign, source)
    quantized = {f"{module}.weight" for module in files.quantized}
    for name, tensor in foreign.tensors.items():
        values = foreign.read(name)
        progress.advance(tensor.size_bytes)
        if values.is_floating_point() and not values.isfinite().all():
            faults.append(f"{name} holds NaN or infinity")
            continue
        if source is None or name not in source.tensors:
            continue
        original = source.tensors[name].read()
        error = grid.relative_error(original, values.float())
        if name in quantized:
            if folded:
                error = min(error, _unfolded_error(original.float(), values.float()))
            errors[name.removesuffix(".weight")] = error
        elif values.ndim > 1 and not error <= NEGLIGIBLE:
            faults.append(f"{name} is not quantised, and {error:.3f} off its source")
    progress.finish()
    faults += dear(errors, foreign)
    words = "weights (finite)" if source is None else "weights"
    if folded:
        words += ", each column up to a factor, since the norms are rescaled as AWQ does it"
    result.record(words, faults)
    result.worst = sorted(errors.items(), key=lambda item: -item[1])[:5]


def _is_folded(foreign: ForeignCheckpoint, source: ModelSource) -> bool:
    """Whether norms were changed: scales folded into them from the layers they feed, as AWQ
    does.
    """
    shared = (n for n, t in foreign.tensors.items() if len(t.shape) == 1 and n in source.tensors)
    return any(
        grid.relative_error(source.tensors[name].read(), foreign.tensors[name].read().float())
        > NEGLIGIBLE
        for name in shared
        if "norm" in name
    )


def _unfolded_error(original: torch.Tensor, weight: torch.Tensor) -> float:
    """The error that remains with the best factor per column, and then per row."""
    for dim in (0, 1):
        square = (weight * weight).sum(dim, keepdim=True).clamp(min=1e-30)
        weight = weight * ((original * weight).sum(dim, keepdim=True) / square)
    return grid.relative_error(original, weight)


def dear(errors: Mapping[str, float], foreign: ForeignCheckpoint) -> Iterator[str]:
    """Layers that lost more than their number format costs, or much more than the others."""
    by_label: dict[str, list[float]] = {}
    for module, error in errors.items():
        by_label.setdefault(foreign.part(module).label, []).append(error)
    for module, error in errors.items():
        part = foreign.part(module)
        limit = _limit(part.weights)
        usual = statistics.median(by_label[part.label])
        if not math.isfinite(error) or error > limit:
            yield f"{module} is {error:.3f} off its source; {part.label} costs {limit} at most"
        elif len(by_label[part.label]) >= 4 and error > STANDS_OUT * usual:
            yield (
                f"{module} is {error:.4f} off its source, {error / usual:.1f} times as much as "
                f"layers of {part.label} are here"
            )


def _limit(weights: Weights) -> float:
    """The largest relative error that such numbers leave; for ggml's types by their bits."""
    return 4.0 * 0.5**weights.num_bits if weights.kind else numbers.of(weights).max_relative_error
