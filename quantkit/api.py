"""The Python API: one function per pipeline stage.

`import quantkit` exposes these names and loads nothing else; torch is loaded by the first call that
needs it. No function prints or exits: results are returned, errors are raised as `quantkit.errors`,
and progress goes to a callback. The command line is a second front end to the same stages.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.errors import DataError, UsageError
from quantkit.progress import Listener, listening
from quantkit.registry import NATIVE

if TYPE_CHECKING:
    from quantkit.advise.recommendation import Recommendation
    from quantkit.calibration.calibration_set import CalibrationSet
    from quantkit.calls import Call
    from quantkit.dispatch.prediction import Prediction
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.gating.verdict import Verdict
    from quantkit.opening import Model
    from quantkit.recipe import AnyRecipe
    from quantkit.report.comparison import Report
    from quantkit.report.document import Document
    from quantkit.scoring.evaluation import Evaluation
    from quantkit.to_plain import Plain
    from quantkit.verification.checkpoint import Verification

T = TypeVar("T")


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
    """Write a checkpoint `out/RECIPE` for every recipe, all from one pass over the model.

    `calibration` is the name of a set, a folder, a data file (plain text included) or a
    `CalibrationSet`; recipes that need none ignore it. A GGUF file is requantised to GGUF. `tune`
    tunes the codes and scales of every block by gradient descent, for GPTQ recipes.

    With a budget of `bits` per weight or a file `size` instead of recipes, formats are chosen per
    layer for `target` (vllm or llama.cpp) and one checkpoint is written, or none if every layer
    stays in 16 bits. `sensitivity` is a table from an earlier run.
    """
    from quantkit.calls.data import Data
    from quantkit.calls.quantize import Quantization, Spending

    if (recipes is None) == (bits is None and size is None):
        raise UsageError("give recipes, or one of bits and size")
    spending = None
    if recipes is None:
        table = None if sensitivity is None else Path(sensitivity)
        among = tuple(_listed(formats))
        spending = Spending(bits, size, formats=among, table=table, target=target)
    call = Quantization(
        model,
        Path(out),
        () if recipes is None else _listed(recipes),
        spending=spending,
        data=Data(calibration, samples, length),
        format=format,
        engine=engine,
        tune=tune,
        imatrix=None if imatrix is None else Path(imatrix),
        requantize=requantize,
        offload=offload,
        device=device,
        tokenizer=tokenizer,
        revision=revision,
        trust_remote_code=trust_remote_code,
        force=force,
    )
    return _done(call, progress).checkpoints


def verify(
    folder: "str | Path | Checkpoint",
    *,
    source: "Model | None" = None,
    read_weights: bool = True,
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> "Verification":
    """Check the files, tensors, config and weights of any checkpoint, ours or another tool's.

    The result has `.ok` and the list `.faults`.
    """
    from quantkit.calls.verify import Checkpoints, FileCheck

    of = Checkpoints([_folder(folder)], source, trust_remote_code=trust_remote_code)
    (found,) = _done(FileCheck(of, read_weights), progress)
    return found


def predict(
    folder: "str | Path | Checkpoint",
    *,
    engine: str = "vllm",
    version: str | None = None,
    gpu: str | None = None,
) -> "Prediction":
    """Predict what an engine will do with a checkpoint from the engine's own rules.

    Neither the engine nor the weights are loaded. The result has `.ok`, `.verdict` and `.findings`.
    """
    from quantkit.calls.verify import RuleCheck

    (found,) = _done(RuleCheck([_folder(folder)], engine, version, gpu), None)
    return found


def score(
    models: "Model | Checkpoint | Sequence[Model | Checkpoint]",
    *,
    tasks: str | Sequence[str] | None = None,
    prompts: str | Path | None = None,
    judge: str | None = None,
    source: "Model | None" = None,
    limit: int | None = None,
    until: float | None = None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    fewshot_as_multiturn: bool = False,
    system_instruction: str | None = None,
    allow_code: bool = False,
    max_length: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    data: str | Path | None = None,
    cache: str | Path | None = None,
    server: str | None = None,
    backend: str = "transformers",
    python: str | Path | None = None,
    engine_args: Sequence[str] = (),
    device: str = "auto",
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    out: str | Path | None = None,
    progress: Listener | None = None,
) -> "list[Evaluation]":
    """Run lm-eval tasks on source models and checkpoints; with `out`, write one file per model.

    Checkpoints from other tools are compared with `source`, or with the source among `models`.
    `until=0.01` samples questions at random until the interval is a point wide on either side.
    """
    from quantkit.calls.score import Chat, Models, ScoreOptions, Scoring

    if tasks is None and prompts is None:
        raise UsageError("name tasks, such as tasks=['wikitext'], or give prompts")
    asked = ScoreOptions.of(
        _listed(tasks or ()),
        _listed(models),
        prompts=None if prompts is None else Path(prompts),
        judge=judge,
        chat=Chat(apply_chat_template, fewshot_as_multiturn, system_instruction),
        allow_code=allow_code,
        limit=limit,
        num_fewshot=num_fewshot,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
        data=None if data is None else Path(data),
        cache=None if cache is None else Path(cache),
        server=server,
        backend=backend,
        python=None if python is None else Path(python),
        engine_args=tuple(engine_args),
    )
    of = Models(_listed(models), source, revision, tokenizer, trust_remote_code)
    call = Scoring(of, asked, None if out is None else Path(out), until=until, device=device)
    return _done(call, progress).evaluations


def compare(
    scores: "Evaluation | Model | Checkpoint | Sequence[Evaluation | Model | Checkpoint]",
    *,
    notes: Sequence[str] = (),
    tasks: str | Sequence[str] | None = None,
    **how: Any,
) -> "Report":
    """Compare scored candidates with their source, answer by answer.

    Scores are what `score` returned, the files it wrote, or folders of such files. With `tasks`,
    pass a source and checkpoints from any tool instead: they are scored first, and `how` is passed
    on to `score`.
    """
    if tasks is not None:
        from quantkit.report.comparison import Report

        return Report.of(score(scores, tasks=tasks, **how), tuple(notes))
    if how:
        raise UsageError(f"{next(iter(how))} needs tasks: name what to score on")
    from quantkit.calls.report import Reporting
    from quantkit.scoring.evaluation import Evaluation

    given = [one if isinstance(one, Evaluation) else Path(one) for one in _listed(scores)]
    return _done(Reporting(given, notes=tuple(notes)), None)


def gate(
    report: "Report | Document | str | Path",
    policy: str | Path = "default",
    *,
    against: "Report | Document | str | Path | None" = None,
    checkpoints: "Sequence[str | Path | Checkpoint]" = (),
) -> "Verdict":
    """Judge a report by a policy. The result has `.passed` and every check with its reason.

    `against` is an earlier report: candidates are also judged by how they changed since then. With
    `checkpoints`, the gate also checks that these folders are what was scored.
    """
    from quantkit.calls.gate import Judging

    call = Judging(
        _report(report),
        None if str(policy) == "default" else Path(policy),
        None if against is None else _report(against),
        [_folder(one) for one in checkpoints],
    )
    return _done(call, None)


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
    """Build a calibration set for a model from data files in any common format, or from a named
    set.

    The set is returned and, with `out`, also written to that folder.
    """
    from quantkit.calls.calibrate import Build

    names = [str(one) for one in _listed(data)]
    if not names:
        raise DataError("there is no data to build a set from: name files or a set")
    changes = {
        "n_samples": samples,
        "max_length": length,
        "select": select,
        "redact": redact or None,
        "avoid": list(avoid) or None,
        "seed": seed,
    }
    call = Build(
        str(model),
        names[0] if len(names) == 1 else None,
        names if len(names) > 1 else (),
        changes,
        None if out is None else Path(out),
        revision=revision,
        force=force,
    )
    return _done(call, progress)


def convert(
    folder: "str | Path | Checkpoint",
    *,
    to: str,
    out: str | Path | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Listener | None = None,
) -> "Checkpoint | Plain":
    """Write a checkpoint in another format (one of `quantkit.formats.FORMATS`, or `gguf`).

    `bf16`, `f16` and `f32` dequantise a GGUF file or a quantised folder to a plain model folder.
    """
    from quantkit.calls.convert import Conversion, Dequantization
    from quantkit.formats import PLAIN

    target, path = None if out is None else Path(out), _folder(folder)
    if to in PLAIN:
        return _done(Dequantization(path, to, target, trust_remote_code, force), progress)
    return _done(Conversion(path, to, target, trust_remote_code, force), progress)


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
    """Recommend a format for serving a model on a GPU: `.best`, `.reason` and all candidates.

    A model is a folder, a hub id, a config.json or a size such as `70B`; with `report`, quality
    comes from its scores.
    """
    from quantkit.calls.gate import document
    from quantkit.calls.recommend import Advising, Aims, Evidence, Load, Place

    known = []
    if report is not None:
        given = _report(report)
        known = [given if isinstance(given, Path) else document(given)]
    call = Advising(
        [str(model)],
        Place(gpu),
        Load(count, context=context, users=users),
        Aims(objective, min_quality),
        Evidence(known, gpu_hour=gpu_hour),
    )
    found = _done(call, None).answers.found
    if len(found) > 1:
        raise UsageError(f"{gpu} names several GPUs: ask for one at a time")
    return found[0]


def _done(call: "Call[T]", progress: Listener | None) -> T:
    """Run a call and return its result; notes go to the progress listener."""
    listener = listening(progress)
    return call.ready(listener.note)(listener)


def _listed(given: Any) -> list[Any]:
    """One item or several, as a list."""
    return list(given) if isinstance(given, list | tuple | set | Iterator) else [given]


def _folder(given: "str | Path | Checkpoint") -> Path:
    return Path(given) if isinstance(given, str | Path) else given.folder


def _report(given: "Report | Document | str | Path") -> "Report | Document | Path":
    return Path(given) if isinstance(given, str) else given
