"""Every check of a checkpoint, and a list of every fault.

Loading proves little: engines load a checkpoint with a missing scale and write garbage. So the
stored tensors are compared with the exact set that the recipe demands, files with their hashes, and
the weights, read back, with the source.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit import formats, grid, numbers
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.export import folder, verified
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.folder import SCALES_FILE
from quantkit.export.manifest import Manifest
from quantkit.gguf.source import open_model
from quantkit.model.architecture import Architecture
from quantkit.model.shards import StoredTensor, TensorSpec
from quantkit.model.source import ModelSource, is_local, read_config
from quantkit.plan import checkpoint as planning
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress, Silent
from quantkit.storage import guarded
from quantkit.verification import gguf, scales, side_files

if TYPE_CHECKING:
    from quantkit.gguf.requantize import FileLayout

# Calibrated methods may move weights further where inputs are small: the output is what counts.
MAX_OUTPUT_ERROR = 0.25
FAR_OFF = 0.9
"""Limit for any weight as stored, with the scales that were folded into it: a swapped one has 1.4.
Without them columns with small inputs would count as much as those that matter.
"""
ERROR_TOLERANCE = 1e-3


@dataclass
class Verification:
    """What was checked, what was found, what could not be checked."""

    path: Path
    passed: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    worst: list[tuple[str, float]] = field(default_factory=list)
    """The layers with the largest relative error, worst first."""

    @property
    def ok(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "ok": self.ok,
            "passed": self.passed,
            "faults": self.faults,
            "left_out": self.left_out,
            "worst_layers": [{"layer": n, "relative_error": e} for n, e in self.worst],
        }

    def record(self, check: str, faults: list[str]) -> None:
        """Record the outcome of one check."""
        if faults:
            self.faults += [f"{check}: {fault}" for fault in faults]
        else:
            self.passed.append(check)


def verify(
    path: Path,
    source: ModelSource | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    read_weights: bool = True,
) -> Verification:
    """Check a checkpoint folder; without `source`, the one that its manifest names is looked for.

    Without `read_weights` only files, config and tensors are checked, and no source is needed.
    """
    progress = progress or Silent()
    result = Verification(path)
    checkpoint = Checkpoint.open(path)
    manifest = checkpoint.manifest
    result.record("files", list(file_faults(path, manifest)))
    if checkpoint.is_gguf:
        return _verify_gguf(checkpoint, source, result, progress, trust_remote_code, read_weights)
    try:
        tensors = checkpoint.tensors
        result.record("headers", [])
    except QuantkitError as error:
        result.record("headers", [str(error)])
        return result
    if source is None and read_weights:
        source = _find_source(manifest, result, trust_remote_code)
    original = _same_source(manifest, source, result)
    try:
        plan = expected_plan(path, manifest, original, trust_remote_code)
    except QuantkitError as error:
        result.record("config", [str(error)])
        return result
    result.record("config", list(_config_faults(path, plan, original)))
    wrong = list(tensor_faults(tensors, plan))
    result.record("tensors", wrong)
    result.record("bits per weight", list(_size_faults(tensors, plan, manifest)))
    result.record("side files", list(side_files.faults(checkpoint, original)))
    if not read_weights:
        return result
    if original is None:
        faults = list(side_files.tokenizer_faults(path, trust_remote_code))
        result.record("tokenizer", faults)
    misfits = _folded_faults(checkpoint, plan)
    if checkpoint.folder.joinpath(SCALES_FILE).exists():
        result.record("folded scales", misfits)
    if wrong or misfits:
        result.left_out.append("weights: not read back, since the tensors are wrong")
        return result
    if any(spec.name.endswith((*scales.INPUTS, "k_scale", "v_scale")) for spec in plan.specs):
        result.record("activation scales", list(scales.faults(checkpoint, plan, original)))
    errors: dict[str, float] = {}
    faults = list(_value_faults(checkpoint, plan, original, errors, progress))
    result.record("weights" if original else "weights (finite, scales positive)", faults)
    result.worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    return result


def _folded_faults(checkpoint: Checkpoint, plan: Plan) -> list[str]:
    try:
        return list(scales.shape_faults(checkpoint, plan))
    except QuantkitError as error:
        return [str(error)]


def _verify_gguf(
    checkpoint: Checkpoint,
    source: ModelSource | None,
    result: Verification,
    progress: Progress,
    trust_remote_code: bool,
    read_weights: bool,
) -> Verification:
    """The same for a file that llama.cpp reads."""
    manifest = checkpoint.manifest
    try:
        header = checkpoint.gguf
        result.record("header", [])
    except QuantkitError as error:
        result.record("header", [str(error)])
        return result
    original: ModelSource | FileLayout | None
    if gguf.is_of_file(checkpoint):
        original = gguf.original_file(checkpoint)
        if original is None:
            result.left_out.append(f"all but the header: {manifest.source.name} has changed")
            return result
    else:
        if source is None and read_weights:
            source = _find_source(manifest, result, trust_remote_code)
        original = _same_source(manifest, source, result)
    try:
        plan = gguf.expected_plan(checkpoint, original, trust_remote_code)
    except QuantkitError as error:
        result.record("config", [str(error)])
        return result
    result.record("metadata", list(gguf.metadata_faults(checkpoint, plan)))
    model = original if isinstance(original, ModelSource) else None
    result.record("side files", list(side_files.faults(checkpoint, model)))
    if read_weights:
        faults = list(gguf.vocabulary_faults(checkpoint, plan, original, trust_remote_code))
        if model is None:
            faults += side_files.tokenizer_faults(checkpoint.folder, trust_remote_code)
        result.record("tokenizer", faults)
    faults = list(gguf.tensor_faults(checkpoint, plan))
    result.record("tensors", faults)
    size = sum(entry.n_bytes for entry in header.tensors.values())
    wrong = [f"{size} bytes, the manifest says {manifest.size_bytes}"]
    result.record("bits per weight", [] if size == manifest.size_bytes else wrong)
    if not read_weights:
        return result
    if faults:
        result.left_out.append("weights: not read back, since the tensors are wrong")
        return result
    errors: dict[str, float] = {}
    faults = list(gguf.value_faults(checkpoint, plan, original, errors, progress))
    result.record("weights" if original else "weights (finite)", faults)
    result.worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
    return result


def expected_plan(
    path: Path, manifest: Manifest, source: ModelSource | None, trust_remote_code: bool = False
) -> Plan:
    """The plan that must have made this checkpoint, from its source or from its config alone."""
    trust = trust_remote_code or bool(source and source.trust_remote_code)
    architecture = Architecture.of(path, trust)
    if source is not None:
        stored = architecture.stored(source)
    else:
        record = manifest.source
        stored = [
            TensorSpec(name, record.other_dtypes.get(name, record.dtype), shape)
            for name, shape in architecture.shapes.items()
            if name not in architecture.tied
        ]
        stored += [
            TensorSpec(name, dtype, tuple(shape))
            for name, (dtype, shape) in record.extra_tensors.items()
        ]
    return planning.make(architecture, stored, manifest.weights_recipe)


def _find_source(
    manifest: Manifest, result: Verification, trust_remote_code: bool
) -> ModelSource | None:
    """The source by the name in the manifest: a local folder, or a model in the hub's cache."""
    name, revision = manifest.source.name, manifest.source.revision
    try:
        return open_model(name, revision, trust_remote_code, cached_only=True, requantize=True)
    except QuantkitError as error:
        if is_local(name):
            result.record("source", [str(error)])
        result.left_out.append(
            f"comparison with the source: {name} is not available; give it with --source"
        )
        return None


def source_of(manifest: Manifest, trust_remote_code: bool = False) -> ModelSource | None:
    """The exact model that a checkpoint was made from, if available."""
    name, revision = manifest.source.name, manifest.source.revision
    try:
        found = open_model(name, revision, trust_remote_code, cached_only=True, requantize=True)
    except QuantkitError:
        return None
    return found if found.fingerprint == manifest.source.fingerprint else None


def _same_source(
    manifest: Manifest, source: ModelSource | None, result: Verification
) -> ModelSource | None:
    if source is None:
        return None
    if source.fingerprint != manifest.source.fingerprint:
        fault = f"{source.name} is not the model that this checkpoint was made from"
        result.record("source", [fault])
        return None
    result.record("source", [])
    return source


def file_faults(path: Path, manifest: Manifest) -> Iterator[str]:
    """Differences between the files of a folder and its manifest."""
    with guarded(path):
        found = folder.hash_files(path)
    for name, file in manifest.files.items():
        if name not in found:
            yield f"{name} is missing"
        elif found[name].size_bytes != file.size_bytes:
            size = found[name].size_bytes
            yield f"{name} has {size:,} bytes, its manifest says {file.size_bytes:,}"
        elif found[name].sha256 != file.sha256:
            yield f"{name} was changed after it was written (sha256 differs)"
    for name in found:
        if name not in manifest.files and name != verified.FILE:
            yield f"{name} does not belong to the checkpoint"
    if manifest.recipe.digest != manifest.recipe_digest:
        yield "the recipe in the manifest does not match its digest"


def _config_faults(path: Path, plan: Plan, source: ModelSource | None) -> Iterator[str]:
    config = read_config(path)
    stored = config.pop("quantization_config", None)
    # Other versions of transformers may have other names for ignored layers.
    expected = formats.config(plan.recipe, [*plan.ignored, *_also_ignored(stored, plan)])
    if stored != expected:
        yield "quantization_config does not match the recipe"
    if source is not None and config != source.config:
        changed = [k for k in {*config, *source.config} if config.get(k) != source.config.get(k)]
        yield f"{', '.join(sorted(changed))} differ from the source's config"


def _also_ignored(section: Any, plan: Plan) -> list[str]:
    """Other names of ignored layers in a stored config: none that belongs to this checkpoint."""
    keys = ("ignore", "ignored_layers", "modules_to_not_convert")
    lists = (section.get(key) for key in keys) if isinstance(section, dict) else ()
    names = next((names for names in lists if isinstance(names, list)), [])
    known = {*plan.ignored, *plan.quantized}
    return [n for n in names if isinstance(n, str) and n not in known and not n.startswith("re:")]


def tensor_faults(tensors: dict[str, StoredTensor] | Any, plan: Plan) -> Iterator[str]:
    """Differences between stored tensors and those that the recipe demands."""
    expected = {spec.name: spec for spec in plan.specs}
    for name, spec in expected.items():
        found = tensors.get(name)
        if found is None:
            yield f"{name} is missing"
        elif (found.dtype, found.shape) != (spec.dtype, spec.shape):
            yield (
                f"{name} is {found.dtype} {list(found.shape)}, "
                f"it must be {spec.dtype} {list(spec.shape)}"
            )
    for name in tensors:
        if name not in expected:
            yield f"{name} does not belong to the checkpoint"


def _size_faults(tensors: Any, plan: Plan, manifest: Manifest) -> Iterator[str]:
    stored = 8 * sum(t.size_bytes for t in tensors.values()) / plan.n_parameters
    if not abs(stored - plan.bits_per_weight) <= 1e-9:
        yield f"{stored:.4f} are stored, the recipe promises {plan.bits_per_weight:.4f}"
    if not abs(manifest.bits_per_weight - plan.bits_per_weight) <= 1e-9:
        yield f"the manifest says {manifest.bits_per_weight:.4f}, not {plan.bits_per_weight:.4f}"


@torch.no_grad()
def _value_faults(
    checkpoint: Checkpoint,
    plan: Plan,
    source: ModelSource | None,
    errors: dict[str, float],
    progress: Progress,
) -> Iterator[str]:
    progress.start(f"verify {checkpoint.folder.name}", plan.size_bytes)
    for name in checkpoint.manifest.layers.keys() - plan.quantized.keys():
        yield f"{name} is in the manifest's list of layers, but the recipe does not quantise it"
    for module, spec in plan.quantized.items():
        scheme = plan.recipe.part(module).weights
        number = numbers.of(scheme)
        limit = number.max_relative_error
        if module not in checkpoint.manifest.layers:
            yield f"{module} is not in the manifest's list of layers"
            continue
        shape = checkpoint.tensors.get(f"{module}.weight_shape")
        if shape is not None and tuple(shape.read().tolist()) != spec.shape:
            yield f"{module}.weight_shape is not {list(spec.shape)}"
            continue
        try:
            quantized = checkpoint.quantized_weight(module)
        except CheckpointError as fault:
            yield str(fault)
            continue
        steps = grid.steps(quantized, scheme)
        if not scales.are_scales(steps.abs() if plan.recipe.has_signed_scales else steps):
            yield f"{module} has scales that are not finite and positive"
            continue
        stored = grid.dequantize(quantized, scheme)
        if number.has_nan(quantized.values) or not stored.isfinite().all():
            yield f"{module} dequantises to NaN or infinity"
        elif source is not None:
            scaled = [checkpoint.scales.get(f"{module}.{side}_scale") for side in ("in", "out")]
            original = source.tensors[spec.name].read()
            error = grid.relative_error(original, grid.unfold(stored, *scaled))
            errors[module] = error
            layer = checkpoint.manifest.layers[module]
            noted = layer.relative_error
            if not math.isfinite(error):
                yield f"{module} is not finite where its source is"
            elif layer.output_error is None and not error <= limit:
                yield f"{module} is {error:.3f} off its source, more than {limit}"
            elif not (off := grid.relative_error(grid.fold(original, *scaled), stored)) <= FAR_OFF:
                yield f"{module} is {off:.3f} off its source, more than {FAR_OFF}"
            elif layer.output_error is not None and not layer.output_error <= MAX_OUTPUT_ERROR:
                yield f"{module} loses {layer.output_error:.0%} of its output on calibration data"
            elif not abs(error - noted) <= ERROR_TOLERANCE * max(error, noted):
                yield f"{module} is {error:.5f} off its source, its manifest says {noted:.5f}"
        progress.advance(sum(checkpoint.tensors[n].size_bytes for n in checkpoint.parts(module)))
    yield from scales.unequal_scales(checkpoint, plan)
    parts = {name for module in plan.quantized for name in checkpoint.parts(module)}
    parts.update(spec.name for spec in plan.kv_scales)
    for name, tensor in checkpoint.tensors.items():
        if name in parts:
            continue
        values = tensor.read()
        if values.is_floating_point() and not values.isfinite().all():
            yield f"{name} holds NaN or infinity"
        elif source is not None:
            original = source.tensors[name].read()
            divided = checkpoint.scales.get(f"{name}.folded")
            if not (torch.equal(values, original) or _is_folded(values, original, divided)):
                yield f"{name} is not the source's"
        progress.advance(tensor.size_bytes)
    progress.finish()


def _is_folded(values: torch.Tensor, original: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether a parameter is the source's divided by a folded scale, up to its dtype's rounding."""
    if scale is None:
        return False
    # Norms of some families multiply by 1 + w: what was divided is then 1 + w.
    steps = 4 * torch.finfo(values.dtype).eps
    for offset in (0.0, 1.0):
        expected = (original.float() + offset) / scale - offset
        gap = (values.float() - expected).abs()
        if (gap <= steps * (expected.abs() + offset)).all():
            return True
    return False
