"""Shared by commands: running a call, staying offline where possible, showing a report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quantkit import launch
from quantkit.errors import Interrupted
from quantkit.storage import MANIFEST

if TYPE_CHECKING:
    from quantkit.calls import Call
    from quantkit.onepass.ranks import Ranks
    from quantkit.pipeline import Outcome
    from quantkit.report.comparison import Report
    from quantkit.scoring.evaluation import Evaluation

T = TypeVar("T")


def stay_offline_if(local: bool) -> None:
    """Set the offline switches before any Hugging Face library is imported."""
    if local:
        from quantkit.offline import without_hub

        without_hub()


@contextmanager
def sharing(device: str) -> "Iterator[tuple[Ranks | None, str]]":
    """The ranks of the run and this one's device, if torchrun started several processes."""
    place = launch.place()
    if place is None:
        yield None, device
        return
    from quantkit.onepass.distributed import joined

    with joined(place, device) as ranks:
        yield ranks, str(ranks.device)


def run(call: "Call[T]", quiet: bool, verbose: bool = False) -> T:
    """Run a call and show its progress; only rank 0 prints."""
    from quantkit.calls import silent
    from quantkit.cli import console

    quiet = quiet or not launch.is_first()
    stay_offline_if(not call.needs_hub)
    work = call.ready(silent if quiet else partial(console.say, err=True))
    if call.needs_transformers:
        load_lean(quiet)
    with console.progress(quiet, verbose) as progress:
        return work(progress)


def ask(call: "Call[T]") -> T:
    """The same for a call that answers at once, without progress."""
    from quantkit.cli import console
    from quantkit.progress import Silent

    stay_offline_if(not call.needs_hub)
    return call.ready(partial(console.say, err=True))(Silent())


def load_lean(quiet: bool = False) -> None:
    """Load transformers without the parts that no command of this process uses."""
    from quantkit.cli import console
    from quantkit.model import lean_import

    with console.loading(quiet):
        lean_import.load()


@contextmanager
def report_kept(out: Path) -> Iterator[None]:
    """On Ctrl-C, report which results are finished and that the same command resumes."""
    try:
        yield
    except KeyboardInterrupt:
        checkpoints = sorted(path.parent.name for path in out.glob(f"*/{MANIFEST}"))
        scores = sorted(f"scores/{path.name}" for path in out.glob("scores/*.json"))
        kept = ", ".join([*checkpoints, *scores]) or "nothing yet"
        words = f"kept in {out}: {kept}; run the same command again to resume"
        raise Interrupted(words) from None


def show(outcome: "Outcome", as_json: bool) -> None:
    """The result of a whole run."""
    show_report(outcome.report, as_json)


def show_schema() -> None:
    """Print the JSON schema of report.json."""
    from quantkit.cli import console
    from quantkit.report import document

    console.print_json(document.schema())


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
