"""`quantkit report`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson


def command(
    scores: Annotated[
        list[Path], typer.Argument(metavar="SCORES...", help="Score files, or folders of them.")
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write report files here.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Compare scored models with their source."""
    from quantkit.cli import start
    from quantkit.report import files
    from quantkit.report.comparison import Report
    from quantkit.score.evaluation import read_all

    report = Report.of(read_all(scores))
    if out is not None:
        files.write(report, out)
    start.show_report(report, json)
