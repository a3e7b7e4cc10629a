"""Convert an NVFP4 checkpoint to a llama.cpp file: the same codes and scales, so one set of weights
serves both engines.

llama.cpp's own quantiser does not make NVFP4. What the checkpoint keeps in 16 bits stays in 16
bits.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind

from quantkit import numbers
from quantkit.errors import CheckpointError
from quantkit.export.checkpoint import Checkpoint
from quantkit.gguf import conversion, mixture, nvfp4
from quantkit.gguf import plan as planning
from quantkit.gguf.layout import Layout
from quantkit.gguf.plan import GGUFPlan
from quantkit.gguf.tensors import NVFP4_BLOCK, GGUFTensor
from quantkit.gguf.values import FLOATS
from quantkit.gguf.writer import GGUFFile
from quantkit.model.source import ModelSource, read_config
from quantkit.numbers.nvfp4 import NVFP4
from quantkit.progress import Progress
from quantkit.recipe import GGUFRecipe
from quantkit.recipe.gguf import CONVERTED

SCALE_BYTES = 4
TYPES = {"BF16": Kind.BF16, "F16": Kind.F16, "F32": Kind.F32}
"""GGUF types by safetensors dtype."""


def plan_of(checkpoint: Checkpoint, folder: Path, trust_remote_code: bool) -> GGUFPlan:
    """The plan of the file; refused if llama.cpp has no such numbers.

    `folder` has the model's config as it was before quantisation.
    """
    before = checkpoint.manifest.weights_recipe
    held = [numbers.of(part.weights) for part in before.parts]
    if not all(isinstance(number, NVFP4) for number in held):
        kinds = {number.tag for number in held}
        raise CheckpointError(
            f"{checkpoint.folder} holds {' and '.join(sorted(kinds))}, and only NVFP4 can be "
            "converted to GGUF; make a GGUF file from the source model with `quantkit quantize -r "
            "gguf-q4_k_m`"
        )
    if checkpoint.scales:
        raise CheckpointError(
            f"{checkpoint.folder} has scales folded into its layers, so its GGUF file could not "
            "be compared with the source; quantise with a recipe that folds none"
        )
    layout = Layout.of_folder(folder, trust_remote_code)
    _require_blocks(checkpoint, layout)
    recipe = GGUFRecipe(
        name=name_of(checkpoint),
        summary=f"{before.name} for llama.cpp, number for number",
        gguf=CONVERTED,
        tensors=_kept(checkpoint, layout),
    )
    plan = planning.make(layout, recipe, has_importance=False)
    n_scales = sum(len(_scales(checkpoint, tensor)) for tensor in _quantised(plan))
    return replace(plan, scale_bytes=SCALE_BYTES * n_scales)


def name_of(checkpoint: Checkpoint) -> str:
    """The name of the result."""
    return f"{checkpoint.manifest.weights_recipe.name}-{planning.NAME}"


def write(
    checkpoint: Checkpoint, plan: GGUFPlan, scratch: Path, progress: Progress, trust: bool
) -> tuple[str, str]:
    """Write the file into a folder that has the side files; returns its name and hash."""
    layout, record = plan.layout, checkpoint.manifest.source
    assert isinstance(layout, Layout)
    config = read_config(scratch)
    source = ModelSource(record.name, scratch, record.revision, config, {}, trust)
    path = scratch / conversion.file_name(source.label, plan)
    scales = {tensor.name: _scales(checkpoint, tensor) for tensor in _quantised(plan)}
    table: list[tuple[str, tuple[int, ...], Kind]] = []
    for tensor in layout.tensors:
        table.append((tensor.name, tensor.shape, plan.kinds[tensor.name]))
        table += [(name, (1,), Kind.F32) for name in scales.get(tensor.name, {})]
    file = GGUFFile(path, conversion.metadata(layout, plan.recipe, source), table)
    progress.start(f"convert {checkpoint.label}", len(layout.tensors), "tensors")
    try:
        for tensor in layout.tensors:
            file.write(tensor.name, _data(checkpoint, plan, layout, tensor))
            for name, scale in scales.get(tensor.name, {}).items():
                file.write(name, scale)
            progress.advance(1)
    except BaseException:
        file.abandon()
        raise
    progress.finish()
    return path.name, file.close()


def _require_blocks(checkpoint: Checkpoint, layout: Layout) -> None:
    """Refuse what blocks of 64 cannot hold, before anything is written."""
    held = {tensor.module: tensor for tensor in layout.tensors}
    for layer in checkpoint.manifest.layers:
        if layer not in held:
            raise CheckpointError(
                f"{layer} has no tensor of its own in llama.cpp, which keeps experts together; "
                "quantkit writes such NVFP4 for vLLM alone"
            )
        columns = held[layer].shape[-1]
        if columns % NVFP4_BLOCK:
            raise CheckpointError(
                f"{layer} has {columns} columns, not a multiple of the {NVFP4_BLOCK} that a block "
                "of llama.cpp's NVFP4 holds; serve the checkpoint with vLLM"
            )


def _kept(checkpoint: Checkpoint, layout: Layout) -> dict[str, str]:
    """Types of the checkpoint's 16-bit tensors that differ from what the file type implies."""
    found = {}
    for tensor in layout.tensors:
        if tensor.module in checkpoint.manifest.layers or not tensor.parts:
            continue
        kind = TYPES[checkpoint.tensors[tensor.parts[0]].dtype]
        usual = tensor.name in mixture.OUTER and kind == Kind.BF16
        if mixture.quantised(tensor.name, tensor.shape) and not usual:
            found[f"^{re.escape(tensor.name)}$"] = kind.name
    return found


def _quantised(plan: GGUFPlan) -> list[GGUFTensor]:
    return [tensor for tensor in plan.layout.tensors if plan.kinds[tensor.name] == Kind.NVFP4]


def _scales(checkpoint: Checkpoint, tensor: GGUFTensor) -> dict[str, torch.Tensor]:
    """Global scales of a layer's weights and inputs, as factors."""
    assert tensor.module is not None
    held = checkpoint.quantized_weight(tensor.module).global_scale
    assert held is not None
    found = {nvfp4.scale_name(tensor.name, nvfp4.SCALE): held.float().reciprocal().reshape(1)}
    if (inputs := checkpoint.input_scale(tensor.module)) is not None:
        name = nvfp4.scale_name(tensor.name, nvfp4.INPUT_SCALE)
        found[name] = inputs.float().reciprocal().reshape(1)
    return found


def _data(
    checkpoint: Checkpoint, plan: GGUFPlan, layout: Layout, tensor: GGUFTensor
) -> torch.Tensor:
    kind = plan.kinds[tensor.name]
    if kind == Kind.NVFP4:
        assert tensor.module is not None
        held = checkpoint.quantized_weight(tensor.module)
        codes = layout.arranged(tensor, held.values)
        scale = layout.arranged(tensor, held.scale.view(torch.uint8))
        return nvfp4.pack(codes, scale)
    if tensor.parts:
        stored = checkpoint.tensors[tensor.parts[0]].read()
        return layout.arranged(tensor, stored).to(FLOATS[kind])
    return layout.build(tensor.name).to(FLOATS[kind])
