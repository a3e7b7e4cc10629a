"""Everything that is decided, and everything that can fail cheaply, before a weight is read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from quantkit import device as devices
from quantkit import formats
from quantkit.calibration import loading
from quantkit.calibration.build import Vocabulary
from quantkit.calibration.calibration_set import CalibrationSet
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.dispatch import prediction
from quantkit.errors import DataError, HardwareError, RecipeError, SourceError, UnknownName
from quantkit.export import manifest
from quantkit.export.checkpoint import Checkpoint
from quantkit.gguf import by_gram
from quantkit.gguf import plan as gguf_plan
from quantkit.gguf.imatrix import ImportanceMatrix
from quantkit.gguf.layout import Layout
from quantkit.gguf.plan import AnyLayout, GGUFPlan
from quantkit.model.architecture import EXPERT, Architecture
from quantkit.model.source import ModelSource, refuse_experts
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass import checks, llmcompressor, mark, resume, warmup
from quantkit.onepass.estimate import (
    OFFLOAD,
    PROCESS_BYTES,
    Estimate,
    estimate,
    fitting,
    require_room,
)
from quantkit.onepass.ranks import Ranks
from quantkit.plan import checkpoint as planning
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress, Silent
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe
from quantkit.registry import NATIVE
from quantkit.storage import duration, gib, require_space

REPLAYED = 0.75
"""Share of a block's time that a resumed run saves for a finished block; its outputs are
recomputed.
"""


SHARED = "gate and up projections of a block's experts are rounded by the tokens of all of them"
"""What is said where memory forbids statistics of each expert."""


@dataclass(frozen=True)
class CalibrationChoice:
    """What the user asked for; None leaves it to the set."""

    name: str
    n_samples: int | None = None
    length: int | None = None
    evaluation: loading.Evaluation | None = None
    """Finds the texts that models will be scored on, for sets that avoid them."""
    given: CalibrationSet | None = None
    """A set in memory, which needs no name."""
    tokens: CalibrationTokens | None = None
    """What an earlier pass of the same run loaded."""


@dataclass(frozen=True)
class Run:
    """Settings of a run that do not depend on what it makes."""

    progress: Progress = field(default_factory=Silent)
    force: bool = False
    """Replace existing output."""
    offload: str = "auto"
    """When hidden states go to host memory: one of `OFFLOAD`."""
    engine: str = NATIVE
    imatrix: Path | None = None
    """An existing importance matrix for GGUF files."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that share it."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Texts to write next to the weights, by file name."""
    writes: bool = True
    """Whether it makes checkpoints; otherwise it gathers statistics alone."""


@dataclass(frozen=True)
class Job:
    """Everything that is decided before the first weight is read."""

    source: ModelSource
    source_record: manifest.Source
    plans: list[Plan]
    targets: list[Path]
    device: torch.device
    calibration: CalibrationTokens | None
    cost: Estimate | None = None
    """Cost of the calibrated pass."""
    on_host: bool = False
    """Hidden states go to host memory."""
    engine: str = NATIVE
    layout: Layout | None = None
    """How llama.cpp arranges the source, where it is needed."""
    files: list[GGUFPlan] = field(default_factory=list)
    """Plans of recipes that make one file for llama.cpp ..."""
    file_targets: list[Path] = field(default_factory=list)
    """... and their folders."""
    matrix: ImportanceMatrix | None = None
    """The importance matrix for those files, if the user provided one."""
    finished: list[Checkpoint] = field(default_factory=list)
    """What the same run made before it was stopped; no other field includes these."""

    @property
    def shares_experts(self) -> bool:
        """Whether experts share a Gram matrix, for lack of memory for one of each."""
        return self.cost is not None and self.cost.shares_experts

    @property
    def seeks_importance(self) -> bool:
        """Whether the pass gathers an importance matrix."""
        return bool(self.files) and self.calibration is not None and self.matrix is None

    def learns(self, plan: Plan | GGUFPlan) -> bool:
        """Whether calibration affects what is written."""
        if isinstance(plan, GGUFPlan):
            return self.seeks_importance or plan.recipe.needs_calibration
        return plan.recipe.needs_calibration

    @property
    def files_by_gram(self) -> list[GGUFPlan]:
        """Files whose levels are chosen in the pass."""
        return [plan for plan in self.files if plan.recipe.needs_calibration]

    @property
    def everything(self) -> list[tuple[Path, Plan | GGUFPlan]]:
        """Folders of all kinds, and what goes into each."""
        return [
            *zip(self.targets, self.plans, strict=True),
            *zip(self.file_targets, self.files, strict=True),
        ]

    @property
    def resumable(self) -> list[bool]:
        """Whether a stopped run of each plan can resume."""
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
                    "learns_from_calibration": self.learns(plan),
                }
                for target, plan in self.everything
            ],
        }

    def _cost_json(self) -> dict[str, Any] | None:
        if self.cost is None:
            return None
        return {
            "n_blocks": self.cost.n_blocks,
            "n_tokens": self.cost.n_tokens,
            "n_streams": self.cost.n_streams,
            "n_ranks": self.cost.n_ranks,
            "hidden_states_on": "host" if self.on_host else "device",
            "device_bytes": self.cost.device_bytes(self.on_host),
            "host_bytes": self.cost.host_bytes(self.on_host),
            "seconds": self.cost.seconds,
        }


def prepare(
    source: ModelSource,
    recipes: Sequence[AnyRecipe],
    out: Path,
    device: str,
    calibration: CalibrationChoice | None,
    run: Run,
) -> Job:
    """Everything that can fail cheaply fails here."""
    engine, imatrix, ranks = run.engine, run.imatrix, run.ranks
    force, progress = run.force, run.progress
    if engine != NATIVE and ranks.size > 1:
        raise HardwareError(
            f"engine {engine} works in one process, not in {ranks.size}; run it without torchrun"
        )
    if run.offload not in OFFLOAD:
        raise UnknownName("offload mode", run.offload, OFFLOAD)
    given = calibration is not None
    checks.check(recipes, out, given, imatrix, engine, force)
    where = devices.choose(device)
    weights = [recipe for recipe in recipes if isinstance(recipe, Recipe)]
    files = [recipe for recipe in recipes if isinstance(recipe, GGUFRecipe)]
    learning = [recipe for recipe in recipes if recipe.needs_calibration]
    calibrates = given and bool(learning or (files and imatrix is None))
    warming = warmup.begin(where) if calibrates and engine == NATIVE else None
    if ranks.size > 1 and (alone := [recipe for recipe in files if recipe.needs_calibration]):
        raise HardwareError(
            f"recipe {alone[0].name} chooses a file's levels in a single process; run it without "
            "torchrun"
        )
    if engine != NATIVE:
        llmcompressor.check(weights, where, progress)
    architecture = _architecture(source, progress)
    if engine != NATIVE:
        _check_names(source, architecture, engine)
    stored = architecture.stored(source)
    plans = [planning.make(architecture, stored, recipe) for recipe in weights]
    for made in plans:
        _check_engine(source, made)
    if source.quantized_by is not None:
        for made in plans:
            made.notes.append(f"from weights that {source.quantized_by} had quantised")
    layout = Layout.of(source) if files else None
    matrix = read_matrix(imatrix, layout, progress) if imatrix and layout else None
    weighted = calibration is not None or matrix is not None
    gguf_plans = [gguf_plan.make(layout, recipe, weighted) for recipe in files] if layout else []
    for file in gguf_plans:
        if file.recipe.needs_calibration and not by_gram.chosen(file):
            file.notes.append("no layer is stored as a K-quant, so GPTQ has nothing to choose")
    every: list[Plan | GGUFPlan] = [*plans, *gguf_plans] if run.writes else []
    for plan in every:
        progress.note(announce(plan, len(architecture.linears) + len(architecture.routers)))
    # Blocks that the pass has finished stay beside a file until it is complete.
    size = sum(
        plan.size_bytes * (1 + (isinstance(plan, GGUFPlan) and plan.recipe.needs_calibration))
        for plan in every
    )
    require_space(out, size)
    record = manifest.source_record(
        source.place,
        source.revision,
        source.fingerprint,
        stored,
        architecture.check(source),
        planning.usual_dtype(stored),
        manifest.describe_folder(source.folder, source.config),
    )
    record = record.model_copy(update={"quantized_by": source.quantized_by})
    job = Job(
        source,
        record,
        plans,
        [out / recipe.name for recipe in weights],
        where,
        None,
        engine=engine,
        layout=layout,
        files=gguf_plans,
        file_targets=[out / recipe.name for recipe in files],
        matrix=matrix,
    )
    if calibration is None or not calibrates:
        return resume.without_finished(job, force, progress)
    job = _calibrated(job, architecture, calibration, size, run, warming)
    return resume.without_finished(job, force, progress)


OWN = ("config-shape", "missing-layer", "family-gone", "gpt-oss-experts", "deepseek-v4")
"""Rules about the source itself, whatever is made of it; the plan's notes cover the last two."""


def _check_engine(source: ModelSource, plan: Plan) -> None:
    """Stop before a byte is written where vLLM would not load the result, or serve garbage."""
    config = {**source.config, "quantization_config": formats.config(plan.recipe, plan.ignore)}
    linears = {*plan.quantized, *plan.ignored}
    specs = [spec for spec in plan.specs if spec.name.rpartition(".")[0] in linears]
    # Findings about the source itself were reported before there was a plan.
    faults = [one for one in prediction.of_tensors(config, specs).faults if one.rule.id not in OWN]
    if faults:
        raise RecipeError(
            f"recipe {plan.recipe.name}: vLLM would not serve the result: {faults[0]}; "
            f"{faults[0].rule.remedy}"
        )


def _check_names(source: ModelSource, architecture: Architecture, engine: str) -> None:
    """Stop where another engine would not find the planned tensors."""
    what = "one tensor for all experts" if set(source.stored) != set(source.tensors) else ""
    if architecture.renamed:
        what = f"other names than transformers' modules ({architecture.renamed})"
    if what:
        raise SourceError(
            f"{source.folder} has {what}, which engine {engine} does not follow; "
            "use --engine native"
        )


def _architecture(source: ModelSource, progress: Progress) -> Architecture:
    """The model's structure, checked against what is stored."""
    architecture = Architecture.of(source.folder, source.trust_remote_code, source.tensors)
    if not architecture.routers:
        refuse_experts(source.config, source.folder, "but quantkit finds no experts in it")
    for name in architecture.check(source):
        progress.note(
            f"{name} is not part of the model that the config describes; it is copied unchanged"
        )
    planning.check_tied(source, architecture)
    return architecture


def read_matrix(path: Path, layout: AnyLayout, progress: Progress) -> ImportanceMatrix:
    """The importance matrix from a file; one of another model is refused."""
    matrix = ImportanceMatrix.read(path)
    widths = {t.name: t.shape[-1] for t in layout.tensors if t.module is not None}
    for warning in matrix.check(widths):
        progress.note(f"warning: {path.name}: {warning}")
    return matrix


def _calibrated(
    job: Job,
    architecture: Architecture,
    calibration: CalibrationChoice,
    disk_bytes: int,
    run: Run,
    warming: Thread | None,
) -> Job:
    """The same job with its calibration tokens and the cost of the pass."""
    progress, ranks = run.progress, run.ranks
    found = load_tokens(job.source, architecture, calibration, progress)
    n_samples, length = found.ids.shape
    size = f"{length:,} tokens"
    if found.mask is not None:
        size = f"up to {length:,} tokens, {found.n_tokens:,} in all,"
    progress.note(f"calibration: {n_samples} samples of {size} from {found.name}")
    learners = [plan for plan in job.plans if plan.recipe.needs_calibration]
    for warning in _thin(found, learners, architecture.chosen_share):
        progress.note(warning)
    if job.engine != NATIVE:
        if found.pictures:
            raise DataError(
                f"{found.name} has images, which engine {job.engine} does not get; leave out "
                "--engine, or give a set of texts"
            )
        return replace(job, calibration=found)
    job = replace(job, calibration=found)
    if warming is not None:
        warming.join()
    n_files = len(job.files_by_gram)
    cost = estimate(
        architecture,
        learners,
        found,
        job.device,
        ranks.size,
        n_files=n_files if n_files or job.seeks_importance else None,
    )
    cost = replace(cost, n_local_ranks=ranks.local_size)
    cost = fitting(cost, job.device, run.offload)
    on_host = require_room(cost, job.device, run.offload)
    by_gram: list[Plan | GGUFPlan] = [*learners, *job.files_by_gram]
    if cost.shares_experts and by_gram:  # importance alone needs no Gram matrix
        progress.note(f"warning: {_announce_sharing(cost)}")
        for plan in by_gram:
            plan.notes.append(SHARED)
    cost = cost.with_distilling(devices.free_bytes(job.device), on_host)
    there = [mark.blocks_done(t) for t, plan in job.everything if plan.recipe.needs_calibration]
    done = 0 if run.force else min(there, default=0)
    cost = replace(cost, seconds=cost.seconds * (1 - REPLAYED * done / cost.n_blocks))
    progress.note(_announce_cost(cost, on_host, job.device, disk_bytes))
    return replace(job, cost=cost, on_host=on_host)


def load_tokens(
    source: ModelSource,
    architecture: Architecture,
    choice: CalibrationChoice,
    progress: Progress | None = None,
) -> CalibrationTokens:
    """The requested calibration tokens, in the source's own vocabulary."""
    if choice.tokens is not None:
        return choice.tokens
    model = Vocabulary(
        source.label,
        load_tokenizer(source.folder, source.trust_remote_code),
        source.context,
        architecture.n_vocabulary,
        folder=source.folder,
    )
    if choice.given is not None:
        return loading.part_of(choice.given, model, choice.n_samples, choice.length)
    return loading.load(
        choice.name,
        model,
        progress or Silent(),
        choice.n_samples,
        choice.length,
        choice.evaluation,
    )


def _thin(calibration: CalibrationTokens, plans: list[Plan], chosen_share: float) -> list[str]:
    """A Gram matrix of fewer tokens than columns cannot have full rank."""
    widths = {name: w.shape[1] for plan in plans for name, w in plan.quantized.items()}
    kinds = {
        "layers": (1.0, [w for name, w in widths.items() if not EXPERT.search(name)]),
        "experts' layers": (chosen_share, [w for name, w in widths.items() if EXPERT.search(name)]),
    }
    warnings = []
    for kind, (share, found) in kinds.items():
        n_tokens, widest = int(calibration.n_tokens * share), max(found, default=0)
        if n_tokens < 2 * widest:
            mean = " on average" if share < 1 else ""
            warnings.append(
                f"warning: {n_tokens:,} calibration tokens{mean} are few for {kind} of {widest:,} "
                f"inputs; {math.ceil(2 * widest / share):,} or more in all would be better"
            )
    return warnings


def announce(plan: Plan | GGUFPlan, n_layers: int) -> str:
    """One line on what will be written."""
    what = f"{len(plan.quantized)} of {n_layers} linear layers"
    if isinstance(plan, GGUFPlan):
        what = f"{len(plan.quantized)} of {len(plan.kinds)} tensors quantised"
    words = [
        f"{plan.recipe.name}: {what}",
        *plan.notes,
        gib(plan.size_bytes),
        f"{plan.bits_per_weight:.2f} bits per weight",
    ]
    return ", ".join(words)


def _announce_sharing(cost: Estimate) -> str:
    return (
        f"too little memory for a Gram matrix per expert ({gib(cost.experts_bytes)}): "
        f"{SHARED}; with more memory each expert is rounded by its own tokens"
    )


def _announce_cost(cost: Estimate, on_host: bool, device: torch.device, disk_bytes: int) -> str:
    where = f"{gib(cost.device_bytes(on_host))} of GPU memory and " if device.type == "cuda" else ""
    host = cost.host_bytes(on_host)
    if device.type != "cuda":
        host = cost.device_bytes(False) + PROCESS_BYTES
    moved = " (hidden states on the host)" if on_host else ""
    streams = "1 stream" if cost.n_streams == 1 else f"{cost.n_streams} streams"
    each = f" on each of {cost.n_ranks} ranks" if cost.n_ranks > 1 else ""
    disk = f", {gib(disk_bytes)} of disk" if disk_bytes else ""
    return (
        f"plan: {cost.n_blocks} blocks, {streams} of {cost.n_tokens:,} tokens; "
        f"about {where}{gib(host)} of host memory{moved}{each}{disk}, {duration(cost.seconds)}"
    )
