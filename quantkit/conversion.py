"""Convert a checkpoint to another format: the same numbers in other files, or an error.

Layers stream through one at a time, and each is read back from its new form and compared before it
is written. What a format cannot represent is refused: rounding again is the job of `quantize`.
"""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit import device as devices
from quantkit import formats, to_gguf
from quantkit.errors import CheckpointError
from quantkit.export import card, folder, manifest
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import Converted, Manifest
from quantkit.gguf.plan import NAME as GGUF
from quantkit.gguf.plan import GGUFPlan
from quantkit.grid import QuantizedWeight
from quantkit.model import fused
from quantkit.model.shards import DTYPES, TensorSpec
from quantkit.model.source import INDEX, read_config
from quantkit.onepass.datafree import copy_tensor
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress, Silent
from quantkit.storage import (
    refuse_existing,
    require_space,
    scratch_folder,
    sha256_of,
    write_json,
)
from quantkit.verification.checkpoint import expected_plan, file_faults, tensor_faults


def convert(
    path: Path,
    to: str,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Write the checkpoint in a folder in another format to the folder `out`; `gguf` for NVFP4.

    The default output is a sibling of the input, named as `quantize --format` would name it.
    """
    progress = progress or Silent()
    started = time.monotonic()
    checkpoint = Checkpoint.open(path)
    if checkpoint.is_gguf:
        raise CheckpointError(
            f"{checkpoint.folder} holds a GGUF file, whose blocks no other format has; "
            "quantise the source model instead"
        )
    after = None if to == GGUF else _renamed(checkpoint, to)
    name = after.name if after else to_gguf.name_of(checkpoint)
    out = out or path.resolve().with_name(name)
    if out.resolve() == path.resolve():
        raise CheckpointError(f"{out} is the checkpoint itself; name another folder with -o")
    refuse_existing(out, force)
    old = card.existing(out)
    before = _checked_plan(checkpoint, trust_remote_code)
    require_space(out, checkpoint.manifest.size_bytes)
    with scratch_folder(out, force) as scratch:
        plan: Plan | GGUFPlan
        if after is None:
            _write_side_files(checkpoint, None, scratch)
            plan = to_gguf.plan_of(checkpoint, scratch, trust_remote_code)
            file, digest = to_gguf.write(checkpoint, plan, scratch, progress, trust_remote_code)
            hashes = {file: digest}
        else:
            plan = expected_plan(path, after, None, trust_remote_code)
            specs = _in_order(checkpoint, plan)
            together = fused.places(specs, checkpoint.stored, read_config(path))
            with folder.open_folder(scratch, specs, together=together) as writer:
                _write(checkpoint, before, plan, writer, progress)
            hashes = writer.hashes
            _write_side_files(checkpoint, plan, scratch)
        record = checkpoint.manifest.model_copy(
            update={
                "name": plan.recipe.name,
                "format": to,
                "recipe": plan.recipe,
                "recipe_digest": plan.recipe.digest,
                "asked_digest": plan.asked_digest,
                "size_bytes": plan.size_bytes,
                "bits_per_weight": plan.bits_per_weight,
                "quantized_bits_per_weight": plan.quantized_bits_per_weight,
                "files": folder.hash_files(scratch, hashes),
                "converted_from": _origin(checkpoint),
                **_circumstances(time.monotonic() - started),
            }
        )
        card.write(scratch, record, old=old)
        folder.write_manifest(scratch, record)
    return Checkpoint(out, record)


def _renamed(checkpoint: Checkpoint, to: str) -> Manifest:
    """The manifest with the recipe in the new format; refused if the format cannot represent it."""
    before = checkpoint.manifest.weights_recipe
    after = before.in_format(to)
    if after is before:
        raise CheckpointError(f"{checkpoint.folder} is in {to} form already")
    update = {"recipe": after, "name": after.name, "format": after.format}
    return checkpoint.manifest.model_copy(update=update)


def _checked_plan(checkpoint: Checkpoint, trust_remote_code: bool) -> Plan:
    """The plan of an intact folder. A damaged one is refused: it would come out looking intact."""
    path, record = checkpoint.folder, checkpoint.manifest
    plan = expected_plan(path, record, None, trust_remote_code)
    faults = [*file_faults(path, record), *tensor_faults(checkpoint.tensors, plan)]
    if faults:
        raise CheckpointError(f"{path} is damaged: {faults[0]}; run `quantkit verify {path}`")
    return plan


def _in_order(checkpoint: Checkpoint, plan: Plan) -> list[TensorSpec]:
    """Output tensors in the order of the tensors they replace, so that files stay comparable."""
    places = {name: place for place, name in enumerate(checkpoint.tensors)}
    for module, weight in plan.quantized.items():
        place = min(places[name] for name in checkpoint.parts(module))
        places |= {part.name: place for part in formats.specs(module, weight, plan.recipe)}
    return sorted(plan.specs, key=lambda spec: places[spec.name])


def _write(
    checkpoint: Checkpoint,
    before: Plan,
    plan: Plan,
    writer: folder.FolderWriter,
    progress: Progress,
) -> None:
    progress.start(f"convert {checkpoint.label}", before.size_bytes)
    done: set[str] = set()
    for module, weight in before.quantized.items():
        names = checkpoint.parts(module)
        done.update(names)
        stored = {name: checkpoint.tensors[name].read() for name in names}
        held = formats.unpack(module, stored, before.recipe)
        dtype, known = DTYPES[weight.dtype], held
        input_scale = formats.input_scale(module, stored, before.recipe)
        if held.global_scale is None:  # scales are then in the model's dtype
            known = replace(held, scale=held.scale.to(dtype))
            input_scale = None if input_scale is None else input_scale.to(dtype)
        parts = formats.pack(module, known, plan.recipe, input_scale)
        if not _same(held, formats.unpack(module, parts, plan.recipe)):
            raise CheckpointError(
                f"{module} has scales that {plan.recipe.format} cannot hold exactly; call quantkit "
                f"quantize --format {plan.recipe.format}, which rounds to scales that it can"
            )
        for name, part in parts.items():
            writer.write(name, part)
        progress.advance(sum(checkpoint.tensors[name].size_bytes for name in names))
    for name, tensor in checkpoint.tensors.items():
        if name not in done:
            copy_tensor(tensor, [writer], progress)
    progress.finish()


def _same(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    import torch

    if not torch.equal(one.values.view(torch.int8), other.values.view(torch.int8)):
        return False
    if not torch.equal(one.scale.double(), other.scale.double()):
        return False
    if one.global_scale is not None and not torch.equal(one.global_scale, _global(other)):
        return False
    if one.zero_point is None or other.zero_point is None:
        return one.zero_point is other.zero_point
    return torch.equal(one.zero_point, other.zero_point)


def _global(weight: QuantizedWeight) -> Any:
    assert weight.global_scale is not None
    return weight.global_scale


def _write_side_files(checkpoint: Checkpoint, plan: Plan | None, scratch: Path) -> None:
    """Config for the new format (llama.cpp's has no plan); all other files are copied."""
    for name in checkpoint.manifest.files:
        if not name.endswith(".safetensors") and name not in ("config.json", INDEX):
            shutil.copyfile(checkpoint.folder / name, scratch / name)
    config = read_config(checkpoint.folder)
    config.pop("quantization_config", None)
    if plan is not None:
        config["quantization_config"] = formats.config(plan.recipe, plan.ignore)
    write_json(scratch / "config.json", config, allow_nan=True)


def _origin(checkpoint: Checkpoint) -> Converted:
    record = checkpoint.manifest
    return Converted(
        name=record.name,
        format=record.format,
        digest=record.digest,
        manifest_sha256=sha256_of(checkpoint.folder / manifest.FILE),
    )


def _circumstances(seconds: float) -> dict[str, Any]:
    """Time and machine of the conversion."""
    return {
        "versions": manifest.versions(),
        "device": devices.describe(devices.choose("cpu")),
        "seconds": seconds,
        "stage_seconds": {"convert": seconds},
        "peak_host_bytes": devices.peak_host_bytes(),
        "peak_device_bytes": None,
        "created": manifest.now(),
    }
