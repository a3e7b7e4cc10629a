"""`quantkit compare`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import (
    AsJson,
    Datasets,
    Device,
    Force,
    Limit,
    MaxLength,
    Quiet,
    Revision,
    Source,
    Tasks,
    TrustRemoteCode,
    Verbose,
    split,
)


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="A source model and its checkpoints, made by any tool."
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Write the report and scores/ here.")
    ],
    tasks: Tasks = None,
    source: Source = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    data: Datasets = None,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score a source and checkpoints from any tool, and report."""
    from quantkit.calls.score import Comparison, Models, ScoreOptions
    from quantkit.cli import start

    of = Models(models, source, revision, trust_remote_code=trust_remote_code)
    names = split(tasks) if tasks is not None else None
    asked = ScoreOptions.of(names, of.everything, limit=limit, max_length=max_length, data=data)
    report = start.run(Comparison(of, asked, out, device, force), quiet, verbose)
    start.show_report(report, json)
    typer.echo(f"written: {out}/report.json, report.md, report.html, scores/", err=True)
