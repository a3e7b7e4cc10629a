"""What commands share: staying offline where possible, opening what was named, showing a run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit import launch
from quantkit.errors import Interrupted, ScoreError, UsageError
from quantkit.registry import NATIVE, check_engine
from quantkit.storage import MANIFEST

SOURCE_NAME = "source"

if TYPE_CHECKING:
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.model.source import ModelSource
    from quantkit.onepass.prepare import CalibrationChoice
    from quantkit.onepass.ranks import Ranks
    from quantkit.pipeline import Outcome
    from quantkit.recipe import AnyRecipe
    from quantkit.report.comparison import Report
    from quantkit.scoring.evaluation import Evaluation


def stay_offline_if(local: bool) -> None:
    """Set the offline switches before any Hugging Face library is imported."""
    if local:
        from quantkit.offline import without_hub

        without_hub()


@contextmanager
def sharing(device: str) -> "Iterator[tuple[Ranks | None, str]]":
    """The ranks of the run and this one's device, where torchrun started several processes."""
    place = launch.place()
    if place is None:
        yield None, device
        return
    from quantkit.onepass.together import joined

    with joined(place, device) as ranks:
        yield ranks, str(ranks.device)


def recipes(
    names: Sequence[str], engine: str = NATIVE, format: str | None = None, tune: bool = False
) -> "list[AnyRecipe]":
    """Before the model is opened: recipes are quick to read and often wrong."""
    from quantkit.recipe import load

    check_engine(engine)
    loaded = [load(name) for name in names]
    if tune:
        if engine != NATIVE:
            raise UsageError(f"--tune is quantkit's own; leave it out, or --engine {engine}")
        loaded = [recipe.tuned() for recipe in loaded]
    if format is not None:
        loaded = [_in_format(recipe, format) for recipe in loaded]
    if engine != NATIVE:
        # A name of its own, so that one report can compare both engines.
        loaded = [r.model_copy(update={"name": f"{r.name}-{engine}"}) for r in loaded]
    return loaded


def refuse_strangers(targets: Sequence[Path], force: bool) -> None:
    """Stop where a folder that a run would write is neither a checkpoint nor a part of one."""
    from quantkit.onepass.mark import refuse_others

    refuse_others([target for target in targets if not (target / MANIFEST).is_file()], force)


def source(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    calibration: str | None = None,
    requantize: bool = False,
) -> "ModelSource":
    """The model to quantise, without asking a hub where nothing has to come from one."""
    stay_offline_if(is_local(model) and not set_needs_hub(calibration))
    from quantkit.model.source import ModelSource

    return ModelSource.open(model, revision, trust_remote_code, requantize=requantize)


def load_lean(quiet: bool = False) -> None:
    """Have transformers loaded without what no command of this process uses."""
    from quantkit.cli import console
    from quantkit.model import lean

    with console.loading(quiet):
        lean.load()


def _in_format(recipe: "AnyRecipe", format: str) -> "AnyRecipe":
    from quantkit.recipe import Recipe

    if isinstance(recipe, Recipe):
        return recipe.in_format(format)
    raise UsageError(f"recipe {recipe.name} makes a GGUF file, with which --format does not go")


def set_needs_hub(name: str | None) -> bool:
    """Whether a calibration set has to fetch rows, or tasks that it avoids."""
    from quantkit import resources
    from quantkit.calibration import spec
    from quantkit.calibration.reading.files import is_data

    if (
        name is None
        or name == "-"
        or (is_data(name) and name not in resources.names("calibration"))
    ):
        return False
    wanted = spec.read(resources.find("calibration", name))
    away = [task for task in wanted.avoid if not is_data(task) and not is_own(task)]
    return bool(away) or any(source.kind == "hub" for source in wanted.sources)


def calibration_choice(
    name: str | None, n_samples: int | None, length: int | None
) -> "CalibrationChoice | None":
    """What calibration was asked for; sets may avoid what models are scored on."""
    if name is None:
        return None
    from quantkit.onepass.prepare import CalibrationChoice
    from quantkit.scoring import evaluation_text

    return CalibrationChoice(name, n_samples, length, evaluation_text.to_avoid)


def refuse_same_names(targets: "Sequence[ModelSource | Checkpoint]") -> None:
    """Two results of one name would overwrite each other, and no report could tell them apart."""
    from quantkit.export.foreign import is_source

    names = [SOURCE_NAME if is_source(t) else t.label for t in targets]
    if twice := [name for name in names if names.count(name) > 1]:
        what = "two source models" if twice[0] == SOURCE_NAME else f"two checkpoints {twice[0]}"
        raise ScoreError(f"{what} in one call: score one model and its checkpoints at a time")


def is_local(model: str) -> bool:
    """Whether a model needs no hub."""
    return model == "demo" or Path(model).exists()


def is_own(task: str) -> bool:
    """Whether a task ships with quantkit, and takes its data from this machine."""
    from quantkit.scoring import suites

    return suites.is_own(task)


@contextmanager
def telling_what_is_kept(out: Path) -> Iterator[None]:
    """On Ctrl-C, say which results are finished and that the same command goes on from them."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoints = sorted(path.parent.name for path in out.glob(f"*/{MANIFEST}"))
        scores = sorted(f"scores/{path.name}" for path in out.glob("scores/*.json"))
        kept = ", ".join([*checkpoints, *scores]) or "nothing yet"
        words = f"kept in {out}: {kept}; run the same command again to go on from there"
        raise Interrupted(words) from None


def show(outcome: "Outcome", as_json: bool) -> None:
    """The result of a whole run."""
    show_report(outcome.report, as_json)


def show_report(report: "Report", as_json: bool) -> None:
    """A table, and in words whether its differences are real."""
    from quantkit.cli import console
    from quantkit.report import table

    if as_json:
        console.print_json(report.to_json())
        return
    console.print_table(table.titles(report, narrow=True), table.rows(report, narrow=True))
    for line in table.advice(report):
        console.say(line)
    _show_verdicts(report)


def show_verdicts(evaluations: "Sequence[Evaluation]") -> None:
    """Whether differences from the source are real."""
    from quantkit.report.comparison import Report

    _show_verdicts(Report.of(evaluations))


def _show_verdicts(report: "Report") -> None:
    from quantkit.cli import console
    from quantkit.report import table

    for score, lines in table.verdicts(report).items():
        guessed = f" {table.GUESSED}" if report.is_guessed(score) else ""
        console.print_lines(f"{score}, against the source:{guessed}", lines)
