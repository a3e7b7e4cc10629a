"""`quantkit sweep run`, `sweep status` and `sweep report`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson, DryRun, Quiet, Verbose, one_of
from quantkit.errors import EXIT_ERROR, SweepError

app = typer.Typer(
    help="Compare many models, recipes and calibration sets.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Runs = Annotated[str, typer.Argument(metavar="DIR", help="The --out of `sweep run`.")]


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The sweep's YAML file.")],
    out: Annotated[
        str,
        typer.Option(
            "-o", "--out", metavar="DIR", help="Output folder, or a bucket such as s3:// or gs://."
        ),
    ] = "runs",
    on: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where to run: here (one step after another) or ray.",
            callback=one_of("here", "ray"),
        ),
    ] = "here",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address of a Ray cluster, or auto; default: start one here."
        ),
    ] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the unfinished steps of a sweep.

    Resumes after a stop; a changed recipe reruns only what depends on it.
    """
    from quantkit.cli import console, sweep_view
    from quantkit.sweep import start

    with console.progress(quiet, verbose) as progress:
        ready = start.ready(file, out, on, address, progress, dry_run)
        if not dry_run:
            found = ready.run()
    if dry_run:
        sweep_view.show_plan(ready.estimate(), json)
        return
    sweep_view.show_overview(found, out, json)
    if found.given_up:
        n = len(found.given_up)
        raise SweepError(
            f"{n} step{'s' * (n > 1)} failed; the same command tries "
            f"{'them' if n > 1 else 'it'} again:\n"
            + "\n".join(f"  {lost.title}: {lost.error}" for lost in found.given_up)
        )
    raise typer.Exit(found.exit_code or 0)


@app.command("status")
def status(
    out: Runs,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every file with its digest.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show the progress of a sweep."""
    from quantkit.cli import console, sweep_view
    from quantkit.sweep.place import Place
    from quantkit.sweep.status import status as look

    found = look(Place(out), check)
    if json:
        console.print_json(found.to_json())
    else:
        sweep_view.show_status(found)
    if found.faults:
        raise typer.Exit(EXIT_ERROR)


@app.command("report")
def report(out: Runs, json: AsJson = False) -> None:
    """Write one report over all finished steps."""
    from quantkit.cli import sweep_view
    from quantkit.sweep.start import report as write

    sweep_view.show_overview(write(out), out, json)
