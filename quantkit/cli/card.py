"""`quantkit card`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson


def command(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Checkpoint folders.")
    ],
    scores: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A score file, or a folder of them; repeat for more."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report.json that has the checkpoint.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Write a checkpoint's model card anew.

    What people wrote into its README.md stays; scores are those of the folder's own files.
    """
    from quantkit.cli import console, start

    start.stay_offline_if(True)
    from quantkit.export import card
    from quantkit.export.manifest import Manifest
    from quantkit.model.description import README
    from quantkit.report import card as report_card
    from quantkit.report import document
    from quantkit.score.evaluation import read_all

    evaluations = read_all(scores or [])
    told = document.read(report) if report else None
    # All is read and checked before the first card is written.
    work = []
    for folder in checkpoints:
        manifest = Manifest.read(folder)
        before = card.has_scores(card.existing(folder))
        work.append((folder, manifest, report_card.scored(manifest, evaluations, told), before))
    made = []
    for folder, manifest, runs, had_scores in work:
        changed = card.refresh(folder, manifest, runs)
        tasks = [task for run in runs for task in run.tasks]
        made.append({"path": str(folder / README), "changed": changed, "tasks": tasks})
        if had_scores and not runs:
            typer.echo(
                f"{folder}: its card told scores; give --scores to have them again", err=True
            )
    if json:
        console.print_json(made)
        return
    for entry in made:
        typer.echo(f"{entry['path']} {'written' if entry['changed'] else 'is up to date'}")
