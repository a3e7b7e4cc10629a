"""From a model and a budget to a checkpoint: the table, the choice, then the usual pass."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.engine import label
from quantkit.errors import DataError, UsageError
from quantkit.export.checkpoint import Checkpoint
from quantkit.gguf.layout import Layout
from quantkit.mixed import budget as budgets
from quantkit.mixed import candidates, gguf_candidates, page, recipe_file, sensitivity, targets
from quantkit.mixed.budget import Budget, Choice
from quantkit.mixed.table import FILE, Table
from quantkit.model.source import ModelSource
from quantkit.onepass import mark
from quantkit.onepass.prepare import CalibrationChoice, Job, Run, prepare
from quantkit.onepass.run import quantize as run_recipes
from quantkit.storage import refuse_existing, scratch_folder, write_text

if TYPE_CHECKING:
    from quantkit.mixed.rounding import AnyCandidate

PAGE = "sensitivity.html"
NO_DATA = "choosing formats needs calibration data: give --calibration, a set's name or a text file"


@dataclass(frozen=True)
class MixedOptions:
    """A budget, and what it may be spent on."""

    budget: Budget
    formats: tuple[str, ...] = ()
    """Names of formats or of mixes; empty: the default mix."""
    table: Path | None = None
    """An existing table, or the folder that holds it."""
    engine: str = "vllm"
    """One of `candidates.ENGINES`."""


@dataclass(frozen=True)
class Formats:
    """The formats that a table covers."""

    names: tuple[str, ...] = ()
    engine: str = "vllm"


@dataclass(frozen=True)
class MixedResult:
    """The result of a budget."""

    choice: Choice
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """One, or none where everything stays in 16 bits."""


def write_table(
    source: ModelSource,
    out: Path,
    device: str,
    calibration: CalibrationChoice | None,
    run: Run,
    formats: Sequence[str] = (),
    engine: str = "vllm",
) -> Table:
    """Measure a model's table, and write it as JSON and as a page into the folder `out`."""
    measuring = _measured(source, out, device, calibration, run, Formats(tuple(formats), engine))
    with measuring as (table, _, scratch):
        write_text(scratch / PAGE, page.render(table))
    return table


@contextmanager
def _measured(
    source: ModelSource,
    target: Path,
    device: str,
    calibration: CalibrationChoice | None,
    run: Run,
    formats: Formats,
) -> Iterator[tuple[Table, Job, Path]]:
    """The table, written into a scratch folder that is renamed afterwards."""
    if calibration is None:
        raise DataError(NO_DATA)
    among: Sequence[AnyCandidate]
    if formats.engine == "llama.cpp":
        layout, among = Layout.of(source), gguf_candidates.by_names(formats.names)
    else:
        layout, among = None, candidates.by_names(formats.names)
    job = _job(source, target, device, calibration, run)
    with scratch_folder(target, run.force, resumable=True, marker=FILE) as scratch:
        table = sensitivity.measure(job, among, run, scratch, layout)
        table.write(scratch)
        yield table, job, scratch
        mark.discard(scratch)


def _job(
    source: ModelSource, target: Path, device: str, calibration: CalibrationChoice, run: Run
) -> Job:
    """A job that gathers statistics and writes nothing."""
    quiet = replace(run, force=True, imatrix=None, beside={}, writes=False)
    recipe = sensitivity.statistics_recipe()
    return prepare(source, [recipe], target.parent, device, calibration, quiet)


def choose(source: ModelSource, wanted: MixedOptions, table: Table) -> Choice:
    """The formats that a budget allows, from a table of the same model."""
    if table.source != source.fingerprint:
        raise DataError(
            f"the table is of {table.model}, another model than {source.label}; make one of this "
            "model with `quantkit sensitivity`"
        )
    if table.engine != wanted.engine:
        raise DataError(
            f"the table is for {label(table.engine)}, not for {label(wanted.engine)}; make one "
            f"with `quantkit sensitivity --for {wanted.engine}`"
        )
    target = targets.of(source, wanted.engine)
    return budgets.choose(table, wanted.budget, target, wanted.formats)


def quantize(
    source: ModelSource,
    wanted: MixedOptions,
    out: Path,
    device: str,
    calibration: CalibrationChoice | None,
    run: Run,
) -> MixedResult:
    """Write `out/NAME` with the formats that a budget allows; nothing where 16 bits fit."""
    if calibration is None:
        raise DataError(NO_DATA)
    name = wanted.budget.label
    refuse_existing(out / name, run.force)  # before the pass, not after it
    aside = out / f".{name}.table"
    if wanted.table is not None:
        table = Table.read(wanted.table)
    elif not run.force and (aside / FILE).is_file():  # from a run that stopped after measuring
        table = Table.read(aside)
    else:
        measuring = _measured(
            source,
            aside,
            device,
            calibration,
            replace(run, force=True),
            Formats(wanted.formats, wanted.engine),
        )
        with measuring as (table, job, _):
            calibration = replace(calibration, tokens=job.calibration)
    choice = choose(source, wanted, table)
    if choice.recipe is None:  # its notes are the answer
        shutil.rmtree(aside, ignore_errors=True)
        return MixedResult(choice)
    for note in choice.notes:
        run.progress.note(note)
    run.progress.note(summary(choice))
    beside = {
        recipe_file.FILE: recipe_file.text(choice.recipe, budgets.comments(choice)),
        FILE: table.text(),
    }
    how = replace(run, beside=beside)
    made = run_recipes(source, [choice.recipe], out, device, calibration, how)
    shutil.rmtree(aside, ignore_errors=True)
    return MixedResult(choice, made)


def summary(choice: Choice) -> str:
    """One line on what was chosen."""
    shares = ", ".join(f"{name} {n}" for name, n in unit_counts(choice).items())
    return (
        f"{choice.budget.label}: {choice.bits:.2f} bits per quantised weight, predicted KL "
        f"{choice.allocation.cost:.3g}; units: {shares}"
    )


def unit_counts(choice: Choice) -> dict[str, int]:
    """Number of units per format in use."""
    names = [choice.table.formats[place] for place in choice.allocation.choice]
    return {name: names.count(name) for name in choice.table.formats if name in names}


def require_no_recipes(named: Sequence[str]) -> None:
    """Refuse recipes: a budget chooses the formats itself."""
    if named:
        raise UsageError("--bits, --size and --mixed choose the formats; leave out --recipe")
