"""`quantkit report`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson


def command(
    scores: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SCORES...",
            help="Score files, folders of them, checkpoint folders, and bench.json files.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write report files here.")
    ] = None,
    note: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A note for readers of the report. Repeatable."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of report.json, and stop.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Compare scored models with their source."""
    from quantkit.calls.report import Reporting
    from quantkit.cli import start

    if schema:
        start.show_schema()
        return
    if not scores:
        raise typer.BadParameter("name score files, or folders of them", param_hint="SCORES")
    report = start.ask(Reporting(scores, out, tuple(note or ())))
    start.show_report(report, json)
    if out is not None:
        typer.echo(f"written: {out}/report.json, report.md, report.html", err=True)
