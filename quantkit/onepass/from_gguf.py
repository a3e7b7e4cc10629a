"""One run whose source is a GGUF file: the same folders and manifests, without a pass."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from quantkit import device as devices
from quantkit.errors import RecipeError
from quantkit.export import card, folder, manifest
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import Layer, Manifest
from quantkit.gguf import conversion, imatrix
from quantkit.gguf import plan as planning
from quantkit.gguf.imatrix import ImportanceMatrix
from quantkit.gguf.reader import read_file
from quantkit.gguf.requantize import FileLayout
from quantkit.onepass import mark, resume
from quantkit.onepass.checks import refuse_twice
from quantkit.onepass.clock import Clock
from quantkit.onepass.prepare import Run, announce, read_matrix
from quantkit.progress import Progress
from quantkit.recipe import AnyRecipe, GGUFRecipe
from quantkit.storage import require_space, scratch_folder


def quantize_file(
    path: Path,
    recipes: Sequence[AnyRecipe],
    out: Path,
    device: str,
    run: Run | None = None,
    requantize: bool = False,
) -> list[Checkpoint]:
    """Write `out/<recipe>/` for every GGUF recipe."""
    clock, run = Clock(), run or Run()
    force, progress = run.force, run.progress
    refuse_twice(recipes)
    for recipe in recipes:
        if not isinstance(recipe, GGUFRecipe):
            raise RecipeError(
                f"recipe {recipe.name} needs a model in Hugging Face form; from {path.name} only "
                "GGUF files can be made"
            )
        if recipe.method is not None:
            raise RecipeError(
                f"recipe {recipe.name} learns from calibration data, which needs a model in "
                f"Hugging Face form; convert {path.name} to one with quantkit convert --to bf16, "
                f"or use gguf-{recipe.gguf.lower()}"
            )
    mark.refuse_others([out / recipe.name for recipe in recipes], force)
    layout = FileLayout.of(read_file(path), requantize)
    matrix = read_matrix(run.imatrix, layout, progress) if run.imatrix else None
    plans = [
        planning.make(layout, recipe, matrix is not None)
        for recipe in recipes
        if isinstance(recipe, GGUFRecipe)
    ]
    where = devices.choose(device)
    keys = {
        out / plan.recipe.name: resume.basic_key(
            layout.fingerprint, plan.recipe.digest, where, matrix
        )
        for plan in plans
    }
    made = resume.finished(keys, force, progress)
    plans = [plan for plan in plans if out / plan.recipe.name not in made]
    for plan in plans:
        progress.note(announce(plan, 0))
    require_space(out, sum(plan.size_bytes for plan in plans))
    clock.lap("plan")
    clock.n_recipes = len(plans)
    cards = {target: card.existing(target) for target in keys}
    with ExitStack() as stack:
        for plan in plans:
            target = out / plan.recipe.name
            scratch = stack.enter_context(scratch_folder(target, force, False))
            if matrix is not None:
                matrix.write(scratch / imatrix.FILE)
            record = _write(layout, plan, scratch, matrix, where, progress, clock)
            card.write(scratch, record, old=cards[target])
            folder.write_manifest(scratch, record)
            mark.mark(scratch, keys[target])
            made[target] = Checkpoint(target, record)
    for target in keys:
        mark.discard(target)
    return [made[target] for target in keys]


def _write(
    layout: FileLayout,
    plan: planning.GGUFPlan,
    scratch: Path,
    matrix: ImportanceMatrix | None,
    device: torch.device,
    progress: Progress,
    clock: Clock,
) -> Manifest:
    kept = layout.file.path.stem.removesuffix(f"-{layout.usual_type}")
    path = scratch / conversion.file_name(kept, plan)
    described = layout.described(plan.recipe.gguf)
    weights = {} if matrix is None else matrix.values
    with clock.of(plan.recipe.name):
        errors, digest = conversion.write(plan, path, described, weights, device, progress)
    clock.lap(plan.recipe.name)
    return Manifest(
        name=plan.recipe.name,
        format=planning.NAME,
        source=manifest.Source(
            name=str(layout.file.path.resolve()),
            revision=None,
            fingerprint=layout.fingerprint,
            size_bytes=layout.size_bytes,
            dtype=layout.usual_type,
            described=manifest.describe_file(layout.file.metadata),
        ),
        recipe=plan.recipe,
        recipe_digest=plan.recipe.digest,
        asked_digest=plan.recipe.digest,
        n_parameters=plan.n_parameters,
        size_bytes=plan.size_bytes,
        bits_per_weight=plan.bits_per_weight,
        quantized_bits_per_weight=plan.quantized_bits_per_weight,
        layers={name: Layer(relative_error=error) for name, error in errors.items()},
        files=folder.hash_files(scratch, {path.name: digest}),
        versions=manifest.versions(),
        device=devices.describe(device),
        seconds=clock.seconds_of(plan.recipe.name),
        stage_seconds=clock.stages,
        peak_host_bytes=devices.peak_host_bytes(),
        peak_device_bytes=devices.peak_device_bytes(device),
        created=manifest.now(),
        notes=plan.notes,
    )
