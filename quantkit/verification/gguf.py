"""Checks that a GGUF file is what its recipe demands, and holds the source."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Kind
from gguf import Keys

from quantkit import grid
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint import Checkpoint
from quantkit.gguf import imatrix, nvfp4
from quantkit.gguf import plan as planning
from quantkit.gguf.layout import Layout
from quantkit.gguf.plan import GGUFPlan, layer_of
from quantkit.gguf.reader import read_file
from quantkit.gguf.requantize import FileLayout
from quantkit.gguf.values import FLOATS
from quantkit.gguf.vocabulary import vocabulary
from quantkit.model.source import ModelSource, read_config
from quantkit.progress import Progress
from quantkit.recipe import GGUFRecipe

# Rounding a bell-shaped weight is off by 0.3 (2 bits), 0.08 (4 bits) or 0.005 (8 bits); a swapped
# or scrambled one by about 1.4.
MAX_RELATIVE_ERROR = {Kind.Q2_K: 0.6, Kind.Q3_K: 0.5, Kind.Q6_K: 0.1, Kind.Q8_0: 0.05}
USUAL_LIMIT = 0.3
OWN_KEYS = (Keys.General.FILE_TYPE, Keys.General.QUANTIZATION_VERSION, Keys.General.QUANTIZED_BY)
"""Keys that differ between a file and one that was made from it."""
ERROR_TOLERANCE = 1e-3
TOKENIZER = "tokenizer."


def is_of_file(checkpoint: Checkpoint) -> bool:
    """Whether this file was made directly from another; if that was opened as a model, it has a
    config.
    """
    named = checkpoint.manifest.source.name.endswith(".gguf")
    return named and not (checkpoint.folder / "config.json").is_file()


def original_file(checkpoint: Checkpoint) -> FileLayout | None:
    """The GGUF file that this one was made from, if it still exists."""
    place = Path(checkpoint.manifest.source.name)
    if not place.is_file():
        return None
    layout = FileLayout.of(read_file(place), requantize=True)
    same = layout.fingerprint == checkpoint.manifest.source.fingerprint
    return layout if same else None


def expected_plan(
    checkpoint: Checkpoint, source: ModelSource | FileLayout | None, trust: bool
) -> GGUFPlan:
    """The plan that must have made this file, from its source or from its config alone."""
    recipe = checkpoint.manifest.recipe
    assert isinstance(recipe, GGUFRecipe)
    layout: planning.AnyLayout
    if isinstance(source, FileLayout):
        layout = source
    else:
        layout = Layout.of(source) if source else Layout.of_folder(checkpoint.folder, trust)
    return planning.make(layout, recipe, imatrix.FILE in checkpoint.manifest.files)


def tensor_faults(checkpoint: Checkpoint, plan: GGUFPlan) -> Iterator[str]:
    """Every tensor that is missing, unexpected, or of another shape or type."""
    found = checkpoint.gguf.tensors
    for tensor in plan.layout.tensors:
        entry, kind = found.get(tensor.name), plan.kinds[tensor.name]
        if entry is None:
            yield f"{tensor.name} is missing"
        elif (entry.shape, entry.kind) != (tensor.shape, kind):
            yield (
                f"{tensor.name} is {entry.kind.name} {list(entry.shape)}, "
                f"not {kind.name} {list(tensor.shape)}"
            )
    scales = {nvfp4.scale_name(name, what) for name in _nvfp4(plan) for what in nvfp4.SCALES}
    for name in sorted(found.keys() - plan.kinds.keys()):
        if name not in scales:
            yield f"{name} does not belong here"
        elif (found[name].shape, found[name].kind) != ((1,), Kind.F32):
            yield f"{name} is {found[name].kind.name} {list(found[name].shape)}, not one F32"
        elif not 0 < checkpoint.gguf.dequantized(name).item() < float("inf"):
            yield f"{name} is {checkpoint.gguf.dequantized(name).item()}, which is not a scale"
    for name in _nvfp4(plan):
        if (scale := nvfp4.scale_name(name, nvfp4.SCALE)) not in found:
            yield f"{scale} is missing"


def _nvfp4(plan: GGUFPlan) -> list[str]:
    return [name for name, kind in plan.kinds.items() if kind == Kind.NVFP4]


def metadata_faults(checkpoint: Checkpoint, plan: GGUFPlan) -> Iterator[str]:
    """Settings that would make llama.cpp compute something else."""
    found = checkpoint.gguf.metadata
    architecture = {str(Keys.General.ARCHITECTURE): plan.layout.architecture}
    for key, value in (architecture | dict(plan.layout.metadata)).items():
        if key in OWN_KEYS:
            continue
        there = found.get(key)
        same = there == value
        if isinstance(value, float) and isinstance(there, float):
            same = struct.pack("<f", value) == struct.pack("<f", there)  # stored in 32 bits
        if not same:
            yield f"{key} is {there}, not {value}"


def vocabulary_faults(
    checkpoint: Checkpoint, plan: GGUFPlan, source: ModelSource | FileLayout | None, trust: bool
) -> Iterator[str]:
    """Tokens, merges and templates that differ from those of the source, or of the folder
    itself.
    """
    found = {k: v for k, v in checkpoint.gguf.metadata.items() if k.startswith(TOKENIZER)}
    if isinstance(source, FileLayout):
        known: Mapping[str, Any] = source.file.metadata
        expected = {k: v for k, v in known.items() if k.startswith(TOKENIZER)}
    else:
        folder, layout = checkpoint.folder, plan.layout
        assert isinstance(layout, Layout)
        try:
            if source is None:
                config = read_config(folder)
                source = ModelSource(str(folder), folder, None, config, {}, trust)
            expected = dict(vocabulary(source, layout.n_vocabulary))
        except QuantkitError as error:
            yield str(error)
            return
    for key in sorted({*found, *expected}):
        if not _same(found.get(key), expected.get(key)):
            yield f"{key} is not that of the source's tokenizer"


def _same(found: Any, expected: Any) -> bool:
    """Whether a file's value is the expected one, which the file stores in 32 bits."""
    if isinstance(expected, list | tuple) and isinstance(found, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, float) and type(found) is float:
        return struct.pack("<f", expected) == struct.pack("<f", found)
    return type(found) is type(expected) and bool(found == expected)


def value_faults(
    checkpoint: Checkpoint,
    plan: GGUFPlan,
    source: ModelSource | FileLayout | None,
    errors: dict[str, float],
    progress: Progress,
) -> Iterator[str]:
    """Numbers that are not finite, or not those of the source."""
    progress.start(f"verify {checkpoint.label}", plan.size_bytes)
    for tensor in plan.layout.tensors:
        kind = plan.kinds[tensor.name]
        values = checkpoint.gguf.dequantized(tensor.name)
        progress.advance(checkpoint.gguf.tensors[tensor.name].n_bytes)
        if not values.isfinite().all():
            yield f"{tensor.name} holds NaN or infinity"
            continue
        if source is None:
            continue
        original = plan.layout.build(tensor.name)
        if kind in FLOATS:
            if not original.to(FLOATS[kind]).float().equal(values):
                yield f"{tensor.name} is not the source's"
            continue
        layer = layer_of(tensor)
        error = errors[layer] = grid.relative_error(original, values)
        limit = MAX_RELATIVE_ERROR.get(kind, USUAL_LIMIT)
        noted = checkpoint.manifest.layers.get(layer)
        if noted is None:
            yield f"{layer} is not in the manifest's list of layers"
        elif not error <= limit:
            yield f"{tensor.name} is {error:.3f} off its source, more than {limit}"
        elif not abs(error - noted.relative_error) <= ERROR_TOLERANCE * max(error, 1e-6):
            yield (
                f"{tensor.name} is {error:.5f} off its source, its manifest says "
                f"{noted.relative_error:.5f}"
            )
    progress.finish()
