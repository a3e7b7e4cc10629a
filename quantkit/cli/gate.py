"""`quantkit gate`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson


def command(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A report.json.")],
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules in YAML; default: ours, by bits.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="REPORT", help="The last release: is this one any worse?"),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Must be what was scored, unchanged; repeat for more."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit XML.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a summary in Markdown.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Judge a report by a policy: exit 0 pass, 1 fail, 3 cannot be judged."""
    from quantkit.calls.gate import Judging
    from quantkit.cli import gate_view, start

    view = gate_view.View(junit, markdown, json)
    with view.telling_errors():
        call = Judging(report, policy, against, checkpoint or [])
        verdict = start.ask(call)
        view.write(verdict)
    view.show(verdict)
    raise typer.Exit(verdict.exit_code)
