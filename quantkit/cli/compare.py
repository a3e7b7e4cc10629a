"""`quantkit compare`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import (
    AsJson,
    Device,
    Limit,
    MaxLength,
    Quiet,
    Revision,
    Tasks,
    TrustRemoteCode,
    Verbose,
    split,
)


def command(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="A source and its checkpoints, of any tool."),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Write the report and scores/ here.")
    ],
    tasks: Tasks = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The source, where it is not among MODEL."),
    ] = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Datasets without a hub: a folder tree like a hub's."),
    ] = None,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score a source and checkpoints of any tool, and report how they compare."""
    from quantkit.cli import console, early, start
    from quantkit.scoring.suites import by_default

    named = [*([source] if source is not None else []), *models]
    names = split(tasks) if tasks is not None else list(by_default(named))
    at_home = data is not None or all(map(start.is_own, names))
    start.stay_offline_if(at_home and all(map(start.is_local, named)))
    early.models(named, revision if source is None else None)
    early.source_among(named)
    early.tasks(names if tasks is not None else [], data)
    early.output(out)
    start.load_lean(quiet)
    from quantkit import opening
    from quantkit.model.source import ModelSource
    from quantkit.report import files
    from quantkit.report.comparison import Report
    from quantkit.scoring.harness import Asked, evaluate
    from quantkit.storage import output_folder

    given = None if source is None else opening.find(source, None, trust_remote_code)
    original = given if isinstance(given, ModelSource) else None
    found = opening.find_all(models, revision, trust_remote_code, original)
    targets = opening.comparable(found, given)
    start.refuse_same_names(targets)
    asked = Asked(tuple(names), limit, max_length=max_length, data=data)
    with output_folder(out), console.progress(quiet, verbose) as progress:
        evaluations = []
        for target in targets:
            evaluations.append(evaluate(target, asked, device, progress, trust_remote_code))
            evaluations[-1].write(out / "scores")
        report = Report.of(evaluations)
        files.write(report, out)
    start.show_report(report, json)
    typer.echo(f"written: {out}/report.json, report.md, report.html, scores/", err=True)
