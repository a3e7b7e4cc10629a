"""The whole pipeline in one folder: quantize, verify, score, report, model cards.

Finished work is kept: after an interruption the same call resumes with the checkpoints and scores
that belong to the same source, recipe and settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.export import card, manifest
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.onepass import mark
from quantkit.onepass.prepare import CalibrationChoice, Run, load_tokens
from quantkit.onepass.run import quantize
from quantkit.plan import checkpoint as planning
from quantkit.progress import Progress
from quantkit.recipe import AnyRecipe, GGUFRecipe
from quantkit.registry import NATIVE
from quantkit.report import card as report_card
from quantkit.report import files
from quantkit.report.comparison import Report
from quantkit.scoring import lmeval
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.harness import evaluate, tasks_of
from quantkit.scoring.options import ScoreOptions
from quantkit.scoring.scorecard import SOURCE_NAME
from quantkit.storage import guarded, output_folder
from quantkit.verification.checkpoint import verify


@dataclass(frozen=True)
class Outcome:
    """What a run left in its folder."""

    checkpoints: list[Checkpoint]
    report: Report
    folder: Path


def run(
    source: ModelSource,
    recipes: Sequence[AnyRecipe],
    asked: ScoreOptions,
    out: Path,
    device: str = "auto",
    calibration: CalibrationChoice | None = None,
    run: Run | None = None,
) -> Outcome:
    """Quantise with every recipe, verify the results, score them as requested and compare."""
    run = run or Run()
    force, progress = run.force, run.progress
    asked = replace(asked, tasks=lmeval.check(asked.tasks))
    scoring = Scoring(asked, out / "scores", device, source.trust_remote_code)
    with output_folder(out):
        finished = [] if force else finished_before(source, recipes, out, calibration, run.engine)
        for checkpoint in finished:
            progress.note(f"{checkpoint.manifest.name}: already finished, reused")
            mark.discard(checkpoint.folder)  # left by a run that was stopped at the very end
            card.existing(checkpoint.folder)  # refuse a card that cannot be updated before any work
        have = {checkpoint.manifest.name for checkpoint in finished}
        missing = [recipe for recipe in recipes if recipe.name not in have]
        made = []
        if missing:
            tasks_of(source, asked, source.trust_remote_code)  # refused before hours of work
            made = quantize(source, missing, out, device, calibration, run)
        by_name = {checkpoint.manifest.name: checkpoint for checkpoint in (*finished, *made)}
        checkpoints = [by_name[recipe.name] for recipe in recipes]
        _require_verified(checkpoints, source, progress)
        with guarded(scoring.folder):
            scoring.folder.mkdir(exist_ok=True)
        targets: list[ModelSource | Checkpoint] = [source, *checkpoints]
        report = Report.of([_score(target, scoring, force, progress) for target in targets])
        files.write(report, out)
        _refresh_cards(checkpoints, report)
    return Outcome(checkpoints, report, out)


def _require_verified(
    checkpoints: Sequence[Checkpoint], source: ModelSource, progress: Progress
) -> None:
    for checkpoint in checkpoints:
        verification = verify(checkpoint.folder, source, progress)
        if not verification.ok:
            faults = "\n  ".join(verification.faults)
            raise CheckpointError(f"{checkpoint.folder} failed verification:\n  {faults}")


def _refresh_cards(checkpoints: Sequence[Checkpoint], report: Report) -> None:
    document, lm_eval = report.document, report.baseline.versions.get("lm_eval")
    for checkpoint in checkpoints:
        scored = report_card.of_document(checkpoint.manifest, document, lm_eval)
        card.refresh(checkpoint.folder, checkpoint.manifest, [scored] if scored else [])


def finished_before(
    source: ModelSource,
    recipes: Sequence[AnyRecipe],
    out: Path,
    calibration: CalibrationChoice | None,
    engine: str = NATIVE,
) -> list[Checkpoint]:
    """Checkpoints of these recipes, source and calibration that an earlier run completed."""
    candidates = [recipe for recipe in recipes if manifest.is_checkpoint(out / recipe.name)]
    if not candidates:
        return []
    architecture = Architecture.of(source.folder, source.trust_remote_code, source.tensors)
    stored = architecture.stored(source)
    wanted = None
    if calibration is not None:
        wanted = load_tokens(source, architecture, calibration).digest
    found = []
    for recipe in candidates:
        checkpoint = Checkpoint.open(out / recipe.name)
        is_file = isinstance(recipe, GGUFRecipe)
        digest = recipe.digest
        if not isinstance(recipe, GGUFRecipe):
            digest = planning.make(architecture, stored, recipe).recipe.digest
        used = checkpoint.manifest.calibration
        learns = recipe.needs_calibration or (is_file and wanted is not None)
        if (
            checkpoint.manifest.engine.split()[0] == engine
            and checkpoint.manifest.source.fingerprint == source.fingerprint
            and checkpoint.manifest.recipe_digest == digest
            and (used.digest if used else None) == (wanted if learns else None)
        ):
            found.append(checkpoint)
    return found


@dataclass(frozen=True)
class Scoring:
    """Settings by which all models of a run are scored."""

    asked: ScoreOptions
    folder: Path
    device: str
    trust_remote_code: bool


def _score(
    target: ModelSource | Checkpoint, scoring: Scoring, force: bool, progress: Progress
) -> Evaluation:
    name = SOURCE_NAME if isinstance(target, ModelSource) else target.label
    path, asked = scoring.folder / f"{name}.json", scoring.asked
    if path.is_file() and not force:
        before = Evaluation.read(path)
        if (
            before.outcomes
            and before.card.digest == target.digest
            and before.card.settings.same_as(
                asked.tasks, asked.limit, asked.max_length, scoring.device
            )
        ):
            progress.note(f"{before.card.name}: scored before")
            return before
    evaluation = evaluate(target, asked, scoring.device, progress, scoring.trust_remote_code)
    evaluation.write(scoring.folder)
    return evaluation
