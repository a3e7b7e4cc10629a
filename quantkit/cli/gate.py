"""`quantkit gate`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson


def command(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A report.json.")],
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Policy in YAML; default: the shipped one, whose limits depend on "
            "model size and bits.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="REPORT", help="Report of the last release; fail if this one is worse."
        ),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="Checkpoint that must be unchanged since it was scored. Repeatable."
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit XML.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a summary in Markdown.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Judge a report by a policy. Exit codes: 0 pass, 1 fail, 3 cannot tell."""
    from quantkit.calls.gate import Judging
    from quantkit.cli import gate_view, start

    view = gate_view.View(junit, markdown, json)
    with view.report_errors():
        call = Judging(report, policy, against, checkpoint or [])
        verdict = start.ask(call)
        view.write(verdict)
    view.show(verdict)
    raise typer.Exit(verdict.exit_code)
