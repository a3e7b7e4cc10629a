"""One run: open the source, plan every recipe, quantise, and leave finished folders."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__, resources
from quantkit import device as devices
from quantkit.calibration import tokens
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import DataError, RecipeError, SourceError, UnknownName
from quantkit.export import compressed_tensors, folder, manifest
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import Layer, Manifest
from quantkit.model.architecture import Architecture
from quantkit.model.shards import DTYPES
from quantkit.model.source import ModelSource, refuse_experts
from quantkit.progress import Progress, Silent
from quantkit.quantize import journal, llmcompressor
from quantkit.quantize import plan as planning
from quantkit.quantize.datafree import quantize_tensors
from quantkit.quantize.estimate import OFFLOAD, PROCESS_BYTES, Estimate, estimate, require_room
from quantkit.quantize.journal import Journal
from quantkit.quantize.onepass import CalibratedOutcome, quantize_blocks
from quantkit.quantize.plan import Plan
from quantkit.recipe import Recipe
from quantkit.registry import NATIVE, check_engine
from quantkit.storage import duration, gib, refuse_existing, require_space, scratch_folder

NEEDS_OTHER_ENGINE = "which the native engine does not quantise; use --engine llmcompressor"


@dataclass(frozen=True)
class CalibrationChoice:
    """What the user asked for; None leaves it to the set."""

    name: str
    n_samples: int | None = None
    length: int | None = None


@dataclass(frozen=True)
class Job:
    """All that is decided before the first weight is read."""

    source: ModelSource
    source_record: manifest.Source
    plans: list[Plan]
    targets: list[Path]
    device: torch.device
    calibration: CalibrationTokens | None
    cost: Estimate | None = None
    """Of the calibrated pass."""
    on_host: bool = False
    """Hidden states go to host memory."""
    engine: str = NATIVE

    @property
    def resumable(self) -> list[bool]:
        """Whether a stopped run of each plan goes on where it was."""
        native = self.engine == NATIVE
        return [native and plan.recipe.needs_calibration for plan in self.plans]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "source": self.source_record.model_dump(mode="json"),
            "engine": self.engine,
            "device": devices.describe(self.device),
            "calibration": None if self.calibration is None else self.calibration.name,
            "estimate": self._cost_json(),
            "checkpoints": [
                {
                    "path": str(target),
                    "recipe": plan.recipe.public(),
                    "n_layers": len(plan.quantized),
                    "size_bytes": plan.size_bytes,
                    "bits_per_weight": plan.bits_per_weight,
                    "needs_calibration": plan.recipe.needs_calibration,
                }
                for target, plan in zip(self.targets, self.plans, strict=True)
            ],
        }

    def _cost_json(self) -> dict[str, Any] | None:
        if self.cost is None:
            return None
        return {
            "n_blocks": self.cost.n_blocks,
            "n_tokens": self.cost.n_tokens,
            "n_streams": self.cost.n_streams,
            "hidden_states_on": "host" if self.on_host else "device",
            "device_bytes": self.cost.device_bytes(self.on_host),
            "host_bytes": self.cost.host_bytes(self.on_host),
            "seconds": self.cost.seconds,
        }


class Clock:
    """How long the run and each of its stages took."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self.stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """The stage that ended just now."""
        now = time.monotonic()
        self.stages[stage], self._last = now - self._last, now

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def quantize(
    source: ModelSource,
    recipes: Sequence[Recipe],
    out: Path,
    device: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
    calibration: CalibrationChoice | None = None,
    offload: str = "auto",
    engine: str = NATIVE,
) -> list[Checkpoint]:
    """Write `out/<recipe>/` for every recipe from one read of the source."""
    progress = progress or Silent()
    clock = Clock()
    job = prepare(
        source,
        recipes,
        out,
        device,
        force,
        progress,
        calibration,
        offload=offload,
        engine=engine,
    )
    clock.lap("plan")
    with ExitStack() as stack:
        # Writers close before folders take their names: the stack unwinds in that order.
        scratches = [
            stack.enter_context(scratch_folder(target, force, resumable))
            for target, resumable in zip(job.targets, job.resumable, strict=True)
        ]
        journals = _open_journals(job, scratches, progress)
        with ExitStack() as writing:
            writers = [
                writing.enter_context(
                    folder.open_folder(scratch, plan.specs, kept.tensors if kept else ())
                )
                for scratch, plan, kept in zip(scratches, job.plans, journals, strict=True)
            ]
            mode = "always" if job.on_host else offload
            outcomes = _quantize(job, writers, journals, progress, mode)
            clock.lap("tensors")
        clock.lap("flush")
        checkpoints = []
        for scratch, target, writer, plan, outcome in zip(
            scratches, job.targets, writers, job.plans, outcomes, strict=True
        ):
            if outcome.scales:
                folder.write_scales(scratch, outcome.scales)
            folder.write_side_files(scratch, source, plan.recipe, plan.ignored)
            files = folder.hash_files(scratch, writer.hashes)
            record = manifest_of(job, plan, outcome.layers, files, clock)
            folder.write_manifest(scratch, record)
            checkpoints.append(Checkpoint(target, record))
    for target in job.targets:  # only now, so that a kill before the renaming loses nothing
        journal.discard(target)
    return checkpoints


def prepare(
    source: ModelSource,
    recipes: Sequence[Recipe],
    out: Path,
    device: str,
    force: bool,
    progress: Progress,
    calibration: CalibrationChoice | None,
    offload: str = "auto",
    engine: str = NATIVE,
) -> Job:
    """Everything that can fail cheaply fails here."""
    check_engine(engine)
    names = [recipe.name for recipe in recipes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RecipeError(f"recipe {min(twice)} was asked for twice")
    targets = [out / name for name in names]
    for target in targets:
        refuse_existing(target, force)
    if offload not in OFFLOAD:
        raise UnknownName("offload mode", offload, OFFLOAD)
    where = devices.choose(device)
    if engine == NATIVE:
        refuse_experts(source.config, source.folder, NEEDS_OTHER_ENGINE)
    else:
        llmcompressor.check(recipes, where, progress)
    architecture = Architecture.of(source.folder, source.trust_remote_code)
    if engine == NATIVE and architecture.routers:  # whatever the config calls its experts
        raise SourceError(f"{source.folder} is a mixture of experts, {NEEDS_OTHER_ENGINE}")
    if not architecture.routers:
        refuse_experts(source.config, source.folder, "but quantkit finds no experts in it")
    unknown = architecture.check(source)
    for name in unknown:
        progress.note(f"{name} is not part of the model as its config tells; it is copied as it is")
    planning.check_tied(source, architecture)
    stored = architecture.stored(source)
    plans = [planning.make(architecture, stored, recipe) for recipe in recipes]
    for plan in plans:
        progress.note(_announce(plan))
    require_space(out, sum(plan.size_bytes for plan in plans))
    record = manifest.source_record(
        source.place,
        source.revision,
        source.fingerprint,
        stored,
        unknown,
        planning.usual_dtype(stored),
    )
    calibrated, cost, on_host = None, None, False
    if learning := [recipe for recipe in recipes if recipe.needs_calibration]:
        if calibration is None:
            raise DataError(
                f"recipe {learning[0].name} learns from data: give --calibration, a set's name "
                f"({', '.join(resources.names('calibration'))}) or a text file"
            )
        calibrated = load_tokens(source, architecture, calibration)
        progress.note(
            f"calibration: {calibrated.ids.shape[0]} samples of {calibrated.ids.shape[1]} tokens "
            f"from {calibrated.name}"
        )
        for warning in _thin(calibrated, plans):
            progress.note(warning)
        if engine == NATIVE:
            learners = [plan for plan in plans if plan.recipe.needs_calibration]
            cost = estimate(architecture, learners, calibrated.ids, where)
            on_host = require_room(cost, where, offload)
            progress.note(_announce_cost(cost, on_host, where, sum(p.size_bytes for p in plans)))
    return Job(source, record, plans, targets, where, calibrated, cost, on_host, engine)


def load_tokens(
    source: ModelSource, architecture: Architecture, choice: CalibrationChoice
) -> CalibrationTokens:
    """The calibration tokens that were asked for, in the source's own vocabulary."""
    from transformers import AutoTokenizer

    context = int(source.config.get("max_position_embeddings") or 2048)
    embedding = next(iter(architecture.shapes.values()))
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    return tokens.load(
        choice.name, tokenizer, context, embedding[0], choice.n_samples, choice.length
    )


def _thin(calibration: CalibrationTokens, plans: list[Plan]) -> list[str]:
    """A Gram matrix of fewer tokens than columns cannot have full rank."""
    widest = max(weight.shape[1] for plan in plans for weight in plan.quantized.values())
    n_tokens = calibration.ids.numel()
    if n_tokens >= 2 * widest:
        return []
    return [
        f"warning: {n_tokens:,} calibration tokens are few for layers of {widest:,} inputs; "
        f"{2 * widest:,} or more would be better"
    ]


def _open_journals(job: Job, scratches: list[Path], progress: Progress) -> list[Journal | None]:
    """What earlier runs of the same recipes finished; None where nothing is kept."""
    journals: list[Journal | None] = []
    for plan, scratch, resumable in zip(job.plans, scratches, job.resumable, strict=True):
        if not resumable:
            journals.append(None)
            continue
        assert job.calibration is not None
        key = {
            "source": job.source_record.fingerprint,
            "recipe": plan.recipe.digest,
            "calibration": job.calibration.digest,
            "device": job.device.type,
            "version of quantkit or torch": f"{__version__} {torch.__version__}",
        }
        kept = Journal.open(scratch, key)
        if kept.n_done:
            progress.note(f"{plan.recipe.name}: going on after {kept.n_done} finished blocks")
        journals.append(kept)
    return journals


def _quantize(
    job: Job,
    writers: list[folder.FolderWriter],
    journals: list[Journal | None],
    progress: Progress,
    offload: str,
) -> list[CalibratedOutcome]:
    """Data-free recipes from one read of the tensors, the others from one pass over the blocks."""
    if job.engine != NATIVE:
        return [
            llmcompressor.quantize_model(
                job.source,
                plan,
                writer,
                job.calibration.ids if job.calibration and plan.recipe.needs_calibration else None,
                DTYPES[job.source_record.dtype],
                job.device,
                progress,
            )
            for plan, writer in zip(job.plans, writers, strict=True)
        ]
    outcomes: dict[int, CalibratedOutcome] = {}
    free = [i for i, plan in enumerate(job.plans) if not plan.recipe.needs_calibration]
    learning = [i for i, plan in enumerate(job.plans) if plan.recipe.needs_calibration]
    if free:
        layers = quantize_tensors(
            job.source,
            [job.plans[i] for i in free],
            [writers[i] for i in free],
            job.device,
            progress,
        )
        outcomes |= {i: CalibratedOutcome(found, {}) for i, found in zip(free, layers, strict=True)}
    if learning:
        assert job.calibration is not None
        results = quantize_blocks(
            job.source,
            [job.plans[i] for i in learning],
            [writers[i] for i in learning],
            job.calibration.ids,
            job.device,
            progress,
            [kept for kept in journals if kept is not None],
            offload,
        )
        outcomes |= dict(zip(learning, results, strict=True))
    return [outcomes[i] for i in range(len(job.plans))]


def manifest_of(
    job: Job,
    plan: Plan,
    layers: dict[str, Layer],
    files: dict[str, manifest.StoredFile],
    clock: Clock,
) -> Manifest:
    """Put together what is known of a checkpoint."""
    return Manifest(
        name=plan.recipe.name,
        format=compressed_tensors.NAME,
        engine=NATIVE if job.engine == NATIVE else f"{job.engine} {llmcompressor.version()}",
        source=job.source_record,
        recipe=plan.recipe,
        recipe_digest=plan.recipe.digest,
        asked_digest=plan.asked_digest,
        n_parameters=plan.n_parameters,
        size_bytes=plan.size_bytes,
        bits_per_weight=plan.bits_per_weight,
        quantized_bits_per_weight=plan.quantized_bits_per_weight,
        calibration=_calibration_record(job) if plan.recipe.needs_calibration else None,
        layers={name: layers[name] for name in plan.quantized},
        files=files,
        versions=manifest.versions(),
        device=devices.describe(job.device),
        seconds=clock.seconds,
        stage_seconds=clock.stages,
        peak_host_bytes=devices.peak_host_bytes(),
        peak_device_bytes=devices.peak_device_bytes(job.device),
        created=manifest.now(),
        notes=plan.notes,
    )


def _calibration_record(job: Job) -> manifest.Calibration:
    assert job.calibration is not None
    n_samples, length = job.calibration.ids.shape
    return manifest.Calibration(
        name=job.calibration.name,
        digest=job.calibration.digest,
        n_samples=n_samples,
        length=length,
    )


def _announce(plan: Plan) -> str:
    n_layers = len(plan.quantized) + len(plan.ignored)
    words = [
        f"{plan.recipe.name}: {len(plan.quantized)} of {n_layers} linear layers",
        *plan.notes,
        gib(plan.size_bytes),
        f"{plan.bits_per_weight:.2f} bits per weight",
    ]
    return ", ".join(words)


def _announce_cost(cost: Estimate, on_host: bool, device: torch.device, disk_bytes: int) -> str:
    where = f"{gib(cost.device_bytes(on_host))} of GPU memory and " if device.type == "cuda" else ""
    host = cost.host_bytes(on_host)
    if device.type != "cuda":
        host = cost.device_bytes(False) + PROCESS_BYTES
    moved = " (hidden states on the host)" if on_host else ""
    return (
        f"plan: {cost.n_blocks} blocks, {cost.n_streams} streams of {cost.n_tokens:,} tokens; "
        f"about {where}{gib(host)} of host memory{moved}, {gib(disk_bytes)} of disk, "
        f"{duration(cost.seconds)}"
    )
