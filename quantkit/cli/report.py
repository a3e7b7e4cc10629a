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
    from quantkit.cli import console
    from quantkit.report import files, table
    from quantkit.report.comparison import Report, read_cards

    report = Report.compare(read_cards(scores))
    if out is not None:
        files.write(report, out)
    if json:
        console.print_json(report.to_json())
    else:
        console.print_table(table.titles(report, narrow=True), table.rows(report))
