"""What steps of each kind do: files in, files out, by the same functions as single commands."""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quantkit import metrics, pipeline
from quantkit.calibration import calibration_set, inspection, loading
from quantkit.calibration import spec as set_spec
from quantkit.calibration.build import Vocabulary
from quantkit.calibration.pool import Reading
from quantkit.errors import CheckpointError, SweepError
from quantkit.export.checkpoint import Checkpoint
from quantkit.gating import policy as policies
from quantkit.gating.judge import judge
from quantkit.model.source import ModelSource
from quantkit.onepass import mark
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.run import quantize as quantize_model
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe
from quantkit.report import files as report_files
from quantkit.report.comparison import Report
from quantkit.report.document import Document
from quantkit.scoring import evaluation_text
from quantkit.scoring.cache import OF_A_SOURCE
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import ScoreOptions
from quantkit.storage import write_json
from quantkit.sweep import parts, ranks
from quantkit.sweep.bench import Bench
from quantkit.sweep.graph import Step
from quantkit.sweep.result import CHECKPOINT, Product
from quantkit.verification.checkpoint import verify as verify_folder

REFERENCES = "references"


def calibrate(steps: Sequence[Step], bench: Bench) -> list[Product]:
    """A calibration set for one model."""
    (step,) = steps
    work, out = step.work, bench.room / "set"
    if "folder" in work:
        found = calibration_set.read(Path(work["folder"]))
    else:
        wanted = set_spec.SetSpec.model_validate(work["spec"])
        vocabulary = Vocabulary.of(work["model"]["place"], work["model"]["revision"])
        known = partial(evaluation_text.load, data=None)
        reading = Reading(Path(work["base"]))
        if unusual := inspection.unusual_size(wanted.n_samples):
            bench.progress.note(f"warning: {unusual}")
        found = loading.make(work["name"], wanted, reading, vocabulary, bench.progress, known)
    found.write(out)
    shape = found.tokens.ids.shape
    facts = {"samples": shape[0], "length": shape[1], "tokens": found.tokens.n_tokens}
    return [Product(out, found.tokens.digest, facts)]


def quantize(steps: Sequence[Step], bench: Bench) -> list[Product]:
    """Checkpoints of several recipes from one pass."""
    work = steps[0].work
    source = _source(work)
    recipes = [_recipe(step.work) for step in steps]
    choice = None
    if steps[0].needs:
        folder = bench.folder_of(steps[0].needs[0])
        choice = CalibrationChoice(str(folder), work.get("samples"), work.get("length"))
    for step, recipe in zip(steps, recipes, strict=True):
        _take_back(bench.room / f"done {step.name}", bench.room / recipe.name)
    finished = pipeline.finished_before(source, recipes, bench.room, choice)
    have = {checkpoint.manifest.name: checkpoint for checkpoint in finished}
    for checkpoint in finished:
        mark.discard(checkpoint.folder)  # left where a run was stopped at the very end
    missing = [recipe for recipe in recipes if recipe.name not in have]
    for recipe in missing:  # anything else of that name is not a result of this step
        shutil.rmtree(bench.room / recipe.name, ignore_errors=True)
    if missing and work["ranks"] > 1:
        ranks.quantize(
            work["model"],
            missing,
            bench.room,
            work["device"],
            work["ranks"],
            choice,
            bench.progress,
        )
        have |= {recipe.name: Checkpoint.open(bench.room / recipe.name) for recipe in missing}
    elif missing:
        run = Run(bench.progress)
        made = quantize_model(source, missing, bench.room, work["device"], choice, run)
        have |= {checkpoint.manifest.name: checkpoint for checkpoint in made}
    products = []
    for step, recipe in zip(steps, recipes, strict=True):
        manifest = have[recipe.name].manifest
        folder = bench.room / f"done {step.name}"
        folder.mkdir()
        (bench.room / recipe.name).rename(folder / CHECKPOINT)
        facts = {"size_bytes": manifest.size_bytes, "bits_per_weight": manifest.bits_per_weight}
        products.append(Product(folder, manifest.digest, facts, manifest.device))
    return products


def verify(steps: Sequence[Step], bench: Bench) -> list[Product]:
    """Every check of a checkpoint; faults are an error."""
    (step,) = steps
    folder = bench.folder_of(step.needs[0]) / CHECKPOINT
    found = verify_folder(folder, _source(step.work), bench.progress)
    if not found.ok:
        raise CheckpointError("\n  ".join([f"{folder} failed verification:", *found.faults]))
    out = bench.room / "verify"
    out.mkdir()
    result = {key: value for key, value in found.to_json().items() if key != "path"}
    write_json(out / "verify.json", result)
    identity = _hash({"checkpoint": Checkpoint.open(folder).digest, "passed": found.passed})
    return [Product(out, identity, {"checks": len(found.passed)})]


def score(steps: Sequence[Step], bench: Bench) -> list[Product]:
    """Tasks of one model, each with its answers; for a source what candidates need of it too."""
    work, cache = steps[0].work, bench.room / "cache"
    source = _source(work)
    target: ModelSource | Checkpoint = source
    cache.mkdir()
    if steps[0].needs:
        target = Checkpoint.open(bench.folder_of(steps[0].needs[0]) / CHECKPOINT)
        link_references([bench.folder_of(step.needs[2]) for step in steps], cache)
    asked = ScoreOptions(
        tuple(step.work["task"] for step in steps),
        work["limit"],
        max_length=work["max_length"],
        cache=cache,
    )
    found = evaluate(target, asked, work["device"], bench.progress, source.trust_remote_code)
    products = []
    for step in steps:
        part = parts.only(found, step.work["task"])
        out = bench.room / step.work["task"]
        part.write(out)
        if not steps[0].needs and any(
            metrics.of(key).name == metrics.PERPLEXITY for key in part.card.scores
        ):
            (out / REFERENCES).mkdir()
            for path in cache.iterdir():
                if path.suffix in OF_A_SOURCE:
                    shutil.copyfile(path, out / REFERENCES / path.name)
        facts = {key: score.value for key, score in part.card.scores.items()}
        products.append(Product(out, parts.identity(part), facts, part.card.device))
    return products


def link_references(folders: Sequence[Path], cache: Path) -> None:
    """Link the source's predictions; those of texts scored together are stored with each text."""
    for folder in folders:
        for path in (folder / REFERENCES).glob("*"):
            if not (cache / path.name).is_symlink():
                (cache / path.name).symlink_to(path.absolute())


def report(steps: Sequence[Step], bench: Bench) -> list[Product]:
    """Everything made from one model, compared with it; steps that were given up are named."""
    (step,) = steps
    work, notes, evaluations = step.work, [], []
    identities = []
    for own, units in work["scores"].items():
        found: list[Evaluation] = []
        lost = [task for task, name in units.items() if name in work.get("given_up", ())]
        if lost:
            if own == "source":
                raise SweepError(f"{work['label']} itself could not be scored on {lost[0]}")
            notes.append(f"{work['labels'][own]} is missing here: not scored on {', '.join(lost)}.")
            continue
        for name in units.values():
            (path,) = bench.folder_of(name).glob("*.json")
            found.append(Evaluation.read(path))
        identities += [parts.identity(part) for part in found]
        evaluations.append(parts.merged(found, work["tasks"], work["groups"], work["labels"][own]))
    made = Report.of(evaluations, tuple(notes))
    out = bench.room / "report"
    report_files.write(made, out)
    document = made.document
    gate = _judged(document, work["policy"], bench.room)
    if gate is not None:
        write_json(out / "gate.json", gate)
    facts = {
        "candidates": len(document.candidates),
        "recommended": document.recommended.name if document.recommended else None,
        "gate": gate and gate["outcome"],
    }
    return [Product(out, _hash([identities, notes, gate]), facts)]


KINDS: Mapping[str, Callable[[Sequence[Step], Bench], list[Product]]] = {
    "calibrate": calibrate,
    "quantize": quantize,
    "verify": verify,
    "score": score,
    "report": report,
}


def _judged(
    document: Document, policy: Mapping[str, Any] | None, room: Path
) -> dict[str, Any] | None:
    if policy is None or not document.candidates:
        return None
    if policy["text"] is None:
        rules = policies.default()
    else:
        path = room / "policy.yaml"
        path.write_text(policy["text"], encoding="utf-8")
        rules = policies.load(path)
    verdict = judge(document, rules)
    return {**verdict.to_json(), "outcome": str(verdict.outcome), "exit_code": verdict.exit_code}


def _take_back(done: Path, target: Path) -> None:
    """A checkpoint that a killed attempt finished but did not publish."""
    if (done / CHECKPOINT).is_dir():
        shutil.rmtree(target, ignore_errors=True)
        (done / CHECKPOINT).rename(target)
    shutil.rmtree(done, ignore_errors=True)


def _source(work: Mapping[str, Any]) -> ModelSource:
    model = work["model"]
    return ModelSource.open(model["place"], model["revision"], model["trust_remote_code"])


def _recipe(work: Mapping[str, Any]) -> AnyRecipe:
    kind: type[AnyRecipe] = GGUFRecipe if work["gguf"] else Recipe
    return kind.validated(dict(work["recipe"]), work["recipe"]["name"])


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
