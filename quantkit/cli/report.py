"""`quantkit report`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson


def command(
    scores: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SCORES...",
            help="Score files, folders of them, checkpoints' folders, and bench.json files.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write report files here.")
    ] = None,
    note: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Something that readers should know; repeats."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of report.json, and stop.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Compare scored models with their source."""
    from quantkit.calls import early
    from quantkit.cli import console, start

    if schema:
        from quantkit.report import document

        console.print_json(document.schema())
        return
    if not scores:
        raise typer.BadParameter("name score files, or folders of them", param_hint="SCORES")
    for path in scores:
        early.file(path)
    early.output(out)
    from quantkit.report import files, inputs, speed
    from quantkit.report.comparison import Report
    from quantkit.storage import output_folder

    with output_folder(out) if out is not None else nullcontext():
        report = Report.of(inputs.read(scores), tuple(note or ()))
        report = speed.joined(report, inputs.speeds(scores))
        if out is not None:
            files.write(report, out)
    start.show_report(report, json)
    if out is not None:
        typer.echo(f"written: {out}/report.json, report.md, report.html", err=True)
