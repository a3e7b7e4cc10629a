"""The Python API: every stage of the line as one function.

`import quantkit` gives these names and loads nothing else; torch comes with the first call that
needs it. No function prints or exits: results are returned, faults raised as `quantkit.errors`, and
progress goes to a callback. The command line is another face of the same stages.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import DataError, UsageError
from quantkit.progress import Listener, listening
from quantkit.registry import NATIVE

if TYPE_CHECKING:
    from quantkit.advise.recommendation import Recommendation
    from quantkit.calibration.calibration_set import CalibrationSet
    from quantkit.dispatch.prediction import Prediction
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.gating.verdict import Verdict
    from quantkit.onepass.prepare import CalibrationChoice
    from quantkit.opening import Model
    from quantkit.recipe import AnyRecipe
    from quantkit.report.comparison import Report
    from quantkit.report.document import Document
    from quantkit.scoring.evaluation import Evaluation
    from quantkit.verification.checkpoint import Verification


def quantize(
    model: "Model",
    recipes: "str | Path | AnyRecipe | Sequence[str | Path | AnyRecipe] | None" = None,
    *,
    out: str | Path,
    bits: float | None = None,
    size: str | int | None = None,
    formats: str | Sequence[str] = (),
    target: str = "vllm",
    sensitivity: str | Path | None = None,
    calibration: "str | Path | CalibrationSet | None" = None,
    samples: int | None = None,
    length: int | None = None,
    device: str = "auto",
    format: str | None = None,
    engine: str = NATIVE,
    offload: str = "auto",
    imatrix: str | Path | None = None,
    tune: bool = False,
    requantize: bool = False,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: Listener | None = None,
) -> "list[Checkpoint]":
    """Make a checkpoint `out/RECIPE` for every recipe, all from one pass over the model.

    A `calibration` is a set's name, a folder, a file of data (plain text too) or a
    `CalibrationSet`; recipes that need none ignore it. A GGUF file is requantised to GGUF. With
    `tune` codes and scales of every block are tuned by gradients, for recipes of GPTQ.

    With `bits` per weight or a `size` of files instead of recipes, formats are chosen layer by
    layer for `target` (vllm or llama.cpp) and one checkpoint is made; none where everything stays
    in 16 bits. `sensitivity` is a table that was made before.
    """
    from quantkit.onepass.prepare import Run
    from quantkit.registry import check_engine

    check_engine(engine)
    matrix = None if imatrix is None else Path(imatrix)
    how = Run(listening(progress), force, offload, engine, matrix)
    if (recipes is None) == (bits is None and size is None):
        raise UsageError("give recipes, or one of bits and size")
    if recipes is None:
        from quantkit.mixed import budget as budgets
        from quantkit.mixed import run as mixed
        from quantkit.opening import opened

        if engine != NATIVE or format is not None or tune:
            raise UsageError("engine, format and tune do not go with bits or size")
        room = budgets.size_bytes(size) if isinstance(size, str) else size
        asked = mixed.Wanted(
            budgets.Budget(bits, room),
            tuple(_listed(formats)),
            None if sensitivity is None else Path(sensitivity),
            target,
        )
        data = _choice(calibration, samples, length)
        with opened(model, tokenizer, revision, trust_remote_code, requantize) as source:
            return mixed.quantize(source, asked, Path(out), device, data, how).checkpoints
    wanted = [_recipe(one, format) for one in _listed(recipes)]
    if tune:
        wanted = [one.tuned() for one in wanted]
    folder = Path(out)
    if isinstance(model, str | Path) and str(model).lower().endswith(".gguf"):
        from quantkit.onepass.from_gguf import quantize_file

        if calibration is not None:
            raise UsageError("a GGUF file cannot be calibrated; give imatrix, a matrix made before")
        return quantize_file(Path(model), wanted, folder, device, how, requantize)
    if engine != NATIVE:
        renamed = [{"name": f"{one.name}-{engine}"} for one in wanted]
        wanted = [one.model_copy(update=new) for one, new in zip(wanted, renamed, strict=True)]
    from quantkit.onepass.run import quantize as run
    from quantkit.opening import opened

    choice = _choice(calibration, samples, length)
    with opened(model, tokenizer, revision, trust_remote_code, requantize) as source:
        return run(source, wanted, folder, device, choice, how)


def verify(
    folder: "str | Path | Checkpoint",
    *,
    source: "Model | None" = None,
    read_weights: bool = True,
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> "Verification":
    """Check files, tensors, config and weights of any checkpoint, whoever made it: `.ok`,
    and all `.faults`."""
    from quantkit.opening import opened
    from quantkit.verification.folder import verify as run

    path = _folder(folder)
    if source is None:
        return run(path, None, listening(progress), trust_remote_code, read_weights)
    with opened(source, None, None, trust_remote_code, requantize=True) as original:
        return run(path, original, listening(progress), trust_remote_code, read_weights)


def predict(
    folder: "str | Path | Checkpoint",
    *,
    engine: str = "vllm",
    version: str | None = None,
    gpu: str | None = None,
) -> "Prediction":
    """What an engine will do with a checkpoint, by its own rules, without it and without reading
    weights: `.ok`, `.verdict`, and all `.findings`."""
    from quantkit.dispatch.prediction import predict as run
    from quantkit.hardware.gpus import find

    return run(_folder(folder), engine, version, find(gpu) if gpu else None)


def score(
    models: "Model | Checkpoint | Sequence[Model | Checkpoint]",
    *,
    tasks: str | Sequence[str] | None = None,
    prompts: str | Path | None = None,
    source: "Model | None" = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    data: str | Path | None = None,
    cache: str | Path | None = None,
    server: str | None = None,
    backend: str = "transformers",
    device: str = "auto",
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    out: str | Path | None = None,
    progress: Listener | None = None,
) -> "list[Evaluation]":
    """Run lm-eval tasks on source models and checkpoints; with `out`, write a file for each.

    Checkpoints of other tools are compared with `source`, or with the source among `models`.
    """
    from quantkit.opening import opened, paired, scorables
    from quantkit.scoring.harness import Asked, evaluate

    listed = _listed(models)
    if server is not None and len(listed) != 1:
        raise UsageError("a server serves one model: give that model alone")
    if tasks is None and prompts is None:
        raise UsageError("name tasks, such as tasks=['wikitext'], or give prompts")
    asked = Asked(
        (tasks,) if isinstance(tasks, str) else tuple(tasks or ()),
        limit,
        num_fewshot,
        max_length,
        batch_size,
        seed,
        None if data is None else Path(data),
        cache=None if cache is None else Path(cache),
        server=server,
        backend=backend,
        prompts=None if prompts is None else Path(prompts),
    )
    found = []
    with ExitStack() as stack:
        original = None
        if source is not None:
            opening = opened(source, tokenizer, None, trust_remote_code)
            original = stack.enter_context(opening)
        given = scorables(listed, tokenizer, revision, trust_remote_code, original)
        targets = stack.enter_context(given)
        for target in paired(targets, original):
            made = evaluate(target, asked, device, listening(progress), trust_remote_code)
            if out is not None:
                made.write(Path(out))
            found.append(made)
    return found


def compare(
    scores: "Evaluation | Model | Checkpoint | Sequence[Evaluation | Model | Checkpoint]",
    *,
    notes: Sequence[str] = (),
    tasks: str | Sequence[str] | None = None,
    **how: Any,
) -> "Report":
    """Hold scored candidates against their source, answer by answer.

    Scores are what `score` returned, files that it wrote, or folders of these. With `tasks`, a
    source and checkpoints of any tool are given instead, and scored first; `how` goes to `score`.
    """
    if tasks is not None:
        from quantkit.report.comparison import Report

        return Report.of(score(scores, tasks=tasks, **how), tuple(notes))
    if how:
        raise UsageError(f"{next(iter(how))} goes with tasks: name what models are scored on")
    from quantkit.report import inputs, speed
    from quantkit.report.comparison import Report
    from quantkit.scoring.evaluation import Evaluation

    listed = _listed(scores)
    paths = [Path(one) for one in listed if not isinstance(one, Evaluation)]
    evaluations = [one for one in listed if isinstance(one, Evaluation)]
    report = Report.of([*evaluations, *(inputs.read(paths) if paths else [])], tuple(notes))
    return speed.joined(report, inputs.speeds(paths)) if paths else report


def gate(
    report: "Report | Document | str | Path",
    policy: str | Path = "default",
    *,
    against: "Report | Document | str | Path | None" = None,
    checkpoints: "Sequence[str | Path | Checkpoint]" = (),
) -> "Verdict":
    """Judge a report by a policy: `.passed`, and every check with its reason.

    With `against`, an earlier report, also by how candidates changed since; with `checkpoints`,
    also whether folders are what was scored.
    """
    from quantkit.gating import policy as policies
    from quantkit.gating.judge import judge
    from quantkit.gating.scored import check_folder

    document = _document(report)
    earlier = None if against is None else _document(against)
    if str(policy) == "default":
        rules = policies.default(earlier is not None)
    else:
        rules = policies.load(Path(policy))
    verdict = judge(document, rules, earlier)
    checks = [check_folder(document, _folder(one), verdict.unjudged) for one in checkpoints]
    return verdict.with_checks(*checks)


def calibrate(
    data: str | Path | Sequence[str | Path],
    *,
    model: str | Path,
    out: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    select: str | None = None,
    redact: bool = False,
    avoid: Sequence[str] = (),
    seed: int | None = None,
    revision: str | None = None,
    force: bool = False,
    progress: Listener | None = None,
) -> "CalibrationSet":
    """Build a calibration set for a model from files of any usual kind, or from a set's name.

    The set is returned and, with `out`, also written to that folder.
    """
    from functools import partial

    from quantkit.calibration import loading, spec
    from quantkit.calibration.build import Vocabulary
    from quantkit.calibration.pool import Reading
    from quantkit.scoring import evaluation_text

    names = [str(one) for one in _listed(data)]
    if not names:
        raise DataError("there is no data to build a set from: name files or a set")
    wanted, base = loading.find(names[0]) if len(names) == 1 else (spec.of_files(names), Path())
    typed = {
        "n_samples": samples,
        "max_length": length,
        "select": select,
        "redact": redact or None,
        "avoid": list(avoid) or None,
        "seed": seed,
    }
    wanted = spec.changed(wanted, {k: v for k, v in typed.items() if v is not None}, names[0])
    made = loading.make(
        ", ".join(names),
        wanted,
        Reading(base),
        Vocabulary.of(str(model), revision),
        listening(progress),
        partial(evaluation_text.known, data=None),
    )
    if out is not None:
        made.write(Path(out), force)
    return made


def convert(
    folder: "str | Path | Checkpoint",
    *,
    to: str,
    out: str | Path | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> "Checkpoint":
    """Write a checkpoint in another format (one of `quantkit.formats.FORMATS`, or `gguf`)."""
    from quantkit.conversion import convert as run

    target = None if out is None else Path(out)
    return run(_folder(folder), to, target, force, listening(progress), trust_remote_code)


def recommend(
    model: str | Path,
    *,
    gpu: str,
    count: int = 1,
    context: int | None = None,
    users: int | None = None,
    objective: str = "latency",
    min_quality: float | None = None,
    report: "Report | Document | str | Path | None" = None,
    gpu_hour: float | None = None,
) -> "Recommendation":
    """Which format to serve a model in on a kind of GPU: `.best`, `.reason` and all candidates.

    A model is a folder, a hub id, a config.json or a size such as `70B`; with `report`, quality
    comes from its scores.
    """
    from quantkit.advise import formats, parallel, quality, shape
    from quantkit.advise.candidates import MIN_QUALITY, Catalogue, Question, check_objective
    from quantkit.advise.recommendation import recommend as answer
    from quantkit.hardware import gpus
    from quantkit.model.source import context_of

    check_objective(objective)
    of_model = shape.of(str(model))
    scored = (
        {}
        if report is None
        else quality.from_document(
            _document(report),
            of_model,
            str(report) if isinstance(report, str | Path) else "the report",
        )
    )
    question = Question(
        Catalogue(of_model, formats.considered(scored, parallel.n_experts(of_model) > 0)),
        context=min(8192, context_of(of_model.config)) if context is None else context,
        users=users,
        count=count,
        objective=objective,
        min_quality=MIN_QUALITY if min_quality is None else min_quality,
        gpu_hour=gpu_hour,
        qualities=scored,
    )
    return answer(question, gpus.find(gpu))


def _listed(given: Any) -> list[Any]:
    """One thing or several, as a list."""
    return list(given) if isinstance(given, list | tuple | set | Iterator) else [given]


def _folder(given: "str | Path | Checkpoint") -> Path:
    return Path(given) if isinstance(given, str | Path) else given.folder


def _recipe(given: "str | Path | AnyRecipe", format: str | None) -> "AnyRecipe":
    from quantkit.recipe import Recipe, load

    recipe = load(str(given)) if isinstance(given, str | Path) else given
    if format is None:
        return recipe
    if not isinstance(recipe, Recipe):
        raise UsageError(f"recipe {recipe.name} makes a GGUF file, which has no other format")
    return recipe.in_format(format)


def _choice(
    calibration: "str | Path | CalibrationSet | None", samples: int | None, length: int | None
) -> "CalibrationChoice | None":
    from quantkit.onepass.prepare import CalibrationChoice

    if calibration is None:
        return None
    if isinstance(calibration, str | Path):
        from quantkit.scoring import evaluation_text

        return CalibrationChoice(str(calibration), samples, length, evaluation_text.to_avoid)
    return CalibrationChoice(calibration.manifest.name, samples, length, given=calibration)


def _document(given: "Report | Document | str | Path") -> "Document":
    from quantkit.report.comparison import Report
    from quantkit.report.document import read

    if isinstance(given, str | Path):
        path = Path(given)
        return read(path / "report.json" if path.is_dir() else path)
    return given.document if isinstance(given, Report) else given
