"""One run: open the source, plan every recipe, quantise, and leave finished folders."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit import device as devices
from quantkit.export import card, expert_layout, folder, manifest
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import Layer, Manifest
from quantkit.gguf import conversion
from quantkit.gguf import imatrix as imatrix_file
from quantkit.gguf.imatrix import ImportanceMatrix
from quantkit.gguf.plan import NAME as GGUF
from quantkit.gguf.plan import GGUFPlan
from quantkit.model.shards import DTYPES
from quantkit.model.source import ModelSource
from quantkit.onepass import llmcompressor, mark, resume
from quantkit.onepass.clock import Clock
from quantkit.onepass.datafree import quantize_tensors
from quantkit.onepass.gguf_levels import FileLevels, Levels
from quantkit.onepass.importance import Importance
from quantkit.onepass.journal import Journal
from quantkit.onepass.onepass import CalibratedOutcome, Pass, quantize_blocks
from quantkit.onepass.prepare import CalibrationChoice, Job, Run, prepare
from quantkit.onepass.worker import WorkerJob, take_part
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress
from quantkit.recipe import AnyRecipe
from quantkit.registry import NATIVE
from quantkit.storage import scratch_folder, write_text


@dataclass(frozen=True)
class ForFiles:
    """What the pass gathers for GGUF files; None where no file asks for it."""

    importance: Importance | None
    levels: Levels | None


def quantize(
    source: ModelSource,
    recipes: Sequence[AnyRecipe],
    out: Path,
    device: str = "auto",
    calibration: CalibrationChoice | None = None,
    run: Run | None = None,
) -> list[Checkpoint]:
    """Write `out/<recipe>/` for every recipe from one pass over the source.

    Where several ranks share the pass, all call this; the first writes and returns the checkpoints.
    """
    run = run or Run()
    force, progress, ranks = run.force, run.progress, run.ranks
    if not ranks.is_first:
        take_part(source, devices.choose(device), run.offload, ranks)
        return []
    clock = Clock()
    job = prepare(source, recipes, out, device, calibration, run)
    # User-written text in the cards of checkpoints that --force replaces.
    cards = {target: card.existing(target) for target in (*job.targets, *job.file_targets)}
    clock.lap("plan")
    clock.n_recipes = len(job.plans) + len(job.files)
    importance = Importance() if job.seeks_importance else None
    with ExitStack() as stack:
        # Writers close before folders are renamed: the stack unwinds in that order.
        scratches = [
            stack.enter_context(scratch_folder(target, force, resumable))
            for target, resumable in zip(job.targets, job.resumable, strict=True)
        ]
        file_scratches = [
            stack.enter_context(scratch_folder(target, force, plan.recipe.needs_calibration))
            for target, plan in zip(job.file_targets, job.files, strict=True)
        ]
        journals = _open_journals(job, scratches, progress)
        learnt = ForFiles(importance, _open_levels(job, file_scratches, progress, clock))
        with ExitStack() as writing:
            writers = [
                writing.enter_context(
                    folder.open_folder(
                        scratch,
                        plan.specs,
                        kept.tensors if kept else (),
                        expert_layout.together(plan.specs, source),
                    )
                )
                for scratch, plan, kept in zip(scratches, job.plans, journals, strict=True)
            ]
            mode = "always" if job.on_host else run.offload
            outcomes = _quantize(job, writers, journals, run, mode, learnt, clock)
            clock.lap("tensors")
        clock.lap("flush")
        made = {checkpoint.label: checkpoint for checkpoint in job.finished}
        for scratch, target, writer, plan, outcome in zip(
            scratches, job.targets, writers, job.plans, outcomes, strict=True
        ):
            with clock.of(plan.recipe.name):
                if outcome.scales:
                    folder.write_scales(scratch, outcome.scales)
                folder.write_side_files(scratch, source, plan.recipe, plan.ignore)
                for name, text in run.beside.items():
                    write_text(scratch / name, text)
                files = folder.hash_files(scratch, writer.hashes)
            record = manifest_of(
                job, plan, outcome.layers, files, clock, outcome.perplexity, ranks.size
            )
            card.write(scratch, record, old=cards[target])
            folder.write_manifest(scratch, record)
            mark.mark(scratch, resume.key_of(job, plan))
            made[plan.recipe.name] = Checkpoint(target, record)
        for scratch, target, file in zip(file_scratches, job.file_targets, job.files, strict=True):
            for name, text in run.beside.items():
                write_text(scratch / name, text)
            record = _write_file(job, file, scratch, learnt, progress, clock, ranks.size)
            card.write(scratch, record, old=cards[target])
            folder.write_manifest(scratch, record)
            mark.mark(scratch, resume.key_of(job, file))
            made[file.recipe.name] = Checkpoint(target, record)
    for checkpoint in made.values():  # only now: being killed while renaming loses nothing
        mark.discard(checkpoint.folder)
    return [made[recipe.name] for recipe in recipes]


def _write_file(
    job: Job,
    plan: GGUFPlan,
    scratch: Path,
    learnt: ForFiles,
    progress: Progress,
    clock: Clock,
    n_ranks: int,
) -> Manifest:
    """Write a GGUF file, and next to it what makes it a checkpoint like the others."""
    importance = learnt.importance
    found = learnt.levels.of(plan) if learnt.levels is not None else None
    matrix = job.matrix
    if importance is not None:
        matrix = _matrix(job, plan, importance)
    if matrix is not None:
        matrix.write(scratch / imatrix_file.FILE)
    path = scratch / conversion.file_name(job.source.label, plan)
    weights = {} if matrix is None else matrix.values
    assert job.layout is not None
    described = conversion.metadata(job.layout, plan.recipe, job.source)
    with clock.of(plan.recipe.name):
        solved = found.blocks if found else None
        errors, digest = conversion.write(
            plan, path, described, weights, job.device, progress, solved
        )
        folder.copy_side_files(scratch, job.source)
        files = folder.hash_files(scratch, {path.name: digest})
    clock.lap(plan.recipe.name)
    layers = {name: Layer(relative_error=error) for name, error in errors.items()}
    layers |= found.journal.layers if found else {}
    perplexity = importance.perplexity if importance is not None else None
    return manifest_of(job, plan, layers, files, clock, perplexity, n_ranks)


def _matrix(job: Job, plan: GGUFPlan, importance: Importance) -> ImportanceMatrix:
    """The importance matrix that the pass gathered, by the file's names for layers."""
    assert job.calibration is not None
    means = importance.means()
    values, counts = {}, {}
    for tensor in plan.layout.tensors:
        modules = [part.removesuffix(".weight") for part in tensor.parts]
        if tensor.module is None or not all(module in means for module in modules):
            continue
        found = torch.stack([means[module] for module in modules])
        values[tensor.name] = found if len(found) > 1 else found[0]
        counts[tensor.name] = torch.tensor([importance.n_tokens[module] for module in modules])
    return ImportanceMatrix(
        values,
        counts,
        (job.calibration.name,),
        job.calibration.ids.shape[1],
    )


def _open_journals(job: Job, scratches: list[Path], progress: Progress) -> list[Journal | None]:
    """The journals of earlier runs of the same recipes; None where nothing is stored."""
    journals: list[Journal | None] = []
    for plan, scratch, resumable in zip(job.plans, scratches, job.resumable, strict=True):
        if not resumable:
            journals.append(None)
            continue
        kept = Journal.open(scratch, resume.key_of(job, plan))
        if kept.n_done:
            progress.note(f"{plan.recipe.name}: resuming after {kept.n_done} finished blocks")
        journals.append(kept)
    return journals


def _open_levels(
    job: Job, scratches: list[Path], progress: Progress, clock: Clock
) -> Levels | None:
    """What the pass chooses for files; None where no recipe asks for it."""
    files = []
    for plan, scratch in zip(job.files, scratches, strict=True):
        if not plan.recipe.needs_calibration:
            continue
        kept = Journal.open(scratch, resume.key_of(job, plan))
        if kept.n_done:
            progress.note(f"{plan.recipe.name}: resuming after {kept.n_done} finished blocks")
        files.append(FileLevels(plan, kept))
    return Levels(files, clock) if files else None


def _quantize(
    job: Job,
    writers: list[folder.FolderWriter],
    journals: list[Journal | None],
    run: Run,
    offload: str,
    learnt: ForFiles,
    clock: Clock,
) -> list[CalibratedOutcome]:
    """Data-free recipes from one read of the tensors, the others from one pass over the blocks."""
    progress, ranks = run.progress, run.ranks
    if job.engine != NATIVE:
        made = []
        for plan, writer in zip(job.plans, writers, strict=True):
            with clock.of(plan.recipe.name):
                made.append(
                    llmcompressor.quantize_model(
                        job.source,
                        plan,
                        writer,
                        job.calibration if plan.recipe.needs_calibration else None,
                        DTYPES[job.source_record.dtype],
                        job.device,
                        progress,
                    )
                )
        return made
    outcomes: dict[int, CalibratedOutcome] = {}
    free = [i for i, plan in enumerate(job.plans) if not plan.recipe.needs_calibration]
    learning = [i for i, plan in enumerate(job.plans) if plan.recipe.needs_calibration]
    worker_job = WorkerJob.of(job, [job.plans[i] for i in learning])
    # Shared work comes first: the other ranks need not wait for the rest.
    ranks.share(worker_job)
    if worker_job.calibration is not None:
        wanted = Pass(
            job.source,
            worker_job.plans,
            worker_job.calibration,
            job.device,
            [writers[i] for i in learning],
            [kept for kept in journals if kept is not None],
            learnt.importance,
            progress,
            ranks,
            learnt.levels,
            clock,
            job.shares_experts,
        )
        results = quantize_blocks(wanted, offload)
        outcomes |= dict(zip(learning, results, strict=True))
    ranks.part()
    if free:
        layers = quantize_tensors(
            job.source,
            [job.plans[i] for i in free],
            [writers[i] for i in free],
            job.device,
            progress,
            clock,
        )
        outcomes |= {i: CalibratedOutcome(found, {}) for i, found in zip(free, layers, strict=True)}
    return [outcomes[i] for i in range(len(job.plans))]


def manifest_of(
    job: Job,
    plan: Plan | GGUFPlan,
    layers: dict[str, Layer],
    files: dict[str, manifest.StoredFile],
    clock: Clock,
    perplexity: float | None = None,
    n_ranks: int = 1,
) -> Manifest:
    """Assemble the manifest of a checkpoint; the perplexity is that of its calibration."""
    return Manifest(
        name=plan.recipe.name,
        format=GGUF if isinstance(plan, GGUFPlan) else plan.recipe.format,
        engine=NATIVE if job.engine == NATIVE else f"{job.engine} {llmcompressor.version()}",
        source=job.source_record,
        recipe=plan.recipe,
        recipe_digest=plan.recipe.digest,
        asked_digest=plan.asked_digest,
        n_parameters=plan.n_parameters,
        size_bytes=plan.size_bytes,
        bits_per_weight=plan.bits_per_weight,
        quantized_bits_per_weight=plan.quantized_bits_per_weight,
        calibration=_calibration_record(job, perplexity) if job.learns(plan) else None,
        layers={name: layers[name] for name in plan.quantized},
        files=files,
        versions=manifest.versions(),
        device=f"{n_ranks} x " * (n_ranks > 1) + devices.describe(job.device),
        seconds=clock.seconds_of(plan.recipe.name),
        stage_seconds=clock.stages,
        peak_host_bytes=devices.peak_host_bytes(),
        peak_device_bytes=devices.peak_device_bytes(job.device),
        created=manifest.now(),
        notes=plan.notes,
    )


def _calibration_record(job: Job, perplexity: float | None) -> manifest.Calibration:
    assert job.calibration is not None
    n_samples, length = job.calibration.ids.shape
    return manifest.Calibration(
        name=job.calibration.name,
        digest=job.calibration.digest,
        n_samples=n_samples,
        length=length,
        n_tokens=job.calibration.n_tokens,
        perplexity=perplexity,
    )
