"""One run: open the source, plan every recipe, quantise, and leave finished folders."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from quantkit import device as devices
from quantkit.errors import RecipeError
from quantkit.export import compressed_tensors, folder, manifest
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import Layer, Manifest
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.progress import Progress, Silent
from quantkit.quantize import plan as planning
from quantkit.quantize.datafree import Errors, quantize_tensors
from quantkit.quantize.plan import Plan
from quantkit.recipe import Recipe
from quantkit.storage import gib, refuse_existing, require_space, scratch_folder


def quantize(
    source: ModelSource,
    recipes: Sequence[Recipe],
    out: Path,
    device: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
) -> list[Checkpoint]:
    """Write `out/<recipe>/` for every recipe from one read of the source."""
    started = time.monotonic()
    progress = progress or Silent()
    names = [recipe.name for recipe in recipes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"recipe {min(twice)} was asked for twice")
    targets = [out / name for name in names]
    for target in targets:
        refuse_existing(target, force)
    where = devices.choose(device)
    architecture = Architecture.of(source.folder, source.trust_remote_code)
    unknown = architecture.check(source)
    for name in unknown:
        progress.note(f"{name} is not part of the model as its config tells; it is copied as it is")
    planning.check_tied(source, architecture)
    stored = architecture.stored(source)
    plans = [planning.make(architecture, stored, recipe) for recipe in recipes]
    for one in plans:
        progress.note(_announce(one))
    require_space(out, sum(one.size_bytes for one in plans))
    with ExitStack() as stack:
        # Writers close before folders take their names: the stack unwinds in that order.
        scratches = [stack.enter_context(scratch_folder(t, force)) for t in targets]
        with ExitStack() as writing:
            writers = [
                writing.enter_context(folder.open_folder(scratch, one.specs))
                for scratch, one in zip(scratches, plans, strict=True)
            ]
            errors = quantize_tensors(source, plans, writers, where, progress)
        checkpoints = []
        for scratch, target, one, layers in zip(scratches, targets, plans, errors, strict=True):
            folder.write_side_files(scratch, source, one.recipe, one.ignored)
            record = manifest_of(
                source,
                one,
                layers,
                folder.hash_files(scratch),
                manifest.source_record(
                    source.name,
                    source.revision,
                    source.fingerprint,
                    stored,
                    unknown,
                    planning.usual_dtype(stored),
                ),
                devices.describe(where),
                time.monotonic() - started,
                devices.peak_device_bytes(where),
            )
            folder.write_manifest(scratch, record)
            checkpoints.append(Checkpoint(target, record))
    return checkpoints


def manifest_of(
    source: ModelSource,
    plan: Plan,
    errors: Errors,
    files: dict[str, manifest.StoredFile],
    source_record: manifest.Source,
    device: str,
    seconds: float,
    peak_device_bytes: int | None,
) -> Manifest:
    """Put together what is known of a checkpoint."""
    return Manifest(
        name=plan.recipe.name,
        format=compressed_tensors.NAME,
        source=source_record,
        recipe=plan.recipe,
        recipe_digest=plan.recipe.digest,
        n_parameters=plan.n_parameters,
        size_bytes=plan.size_bytes,
        bits_per_weight=plan.bits_per_weight,
        quantized_bits_per_weight=plan.quantized_bits_per_weight,
        layers={name: Layer(relative_error=errors[name]) for name in plan.quantized},
        files=files,
        versions=manifest.versions(),
        device=device,
        seconds=seconds,
        peak_host_bytes=devices.peak_host_bytes(),
        peak_device_bytes=peak_device_bytes,
        created=manifest.now(),
        notes=plan.notes,
    )


def _announce(plan: Plan) -> str:
    words = [f"{plan.recipe.name}: {len(plan.quantized)} of "]
    words.append(f"{len(plan.quantized) + len(plan.ignored)} linear layers")
    words += [f", {note}" for note in plan.notes]
    words.append(f", {gib(plan.size_bytes)}, {plan.bits_per_weight:.2f} bits per weight")
    return "".join(words)
