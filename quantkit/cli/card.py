"""`quantkit card`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson, Checkpoints


def command(
    checkpoints: Checkpoints,
    scores: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A score file, or a folder of them; repeat for more."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report.json that has the checkpoint.")
    ] = None,
    without_scores: Annotated[
        bool, typer.Option("--without-scores", help="Let scores that a card tells go.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Write a checkpoint's model card anew.

    What people wrote into its README.md stays; scores are those of the folder's own files.
    """
    from quantkit.cli import console, start

    start.stay_offline_if(True)
    from quantkit.errors import ScoreError
    from quantkit.export.manifest import Manifest, is_checkpoint
    from quantkit.report import document
    from quantkit.scoring.evaluation import read_all

    ours = [folder for folder in checkpoints if is_checkpoint(folder) or not folder.exists()]
    for folder in ours:
        Manifest.read(folder)
    evaluations = read_all(scores or [])
    told = document.read(report) if report else None
    from quantkit.export import card, foreign_card
    from quantkit.model.description import README
    from quantkit.report import card as report_card

    # All is read and checked before the first card is written.
    work = []
    for path in checkpoints:
        known = Manifest.read(path) if path in ours else foreign_card.Foreign.open(path)
        folder = path if path in ours or path.is_dir() else path.parent
        runs = report_card.scored(known, evaluations, told)
        if not runs and not without_scores and card.has_scores(card.existing(folder)):
            raise ScoreError(
                f"{folder}: its card tells scores, which would go; give them with --scores or "
                "--report, or say --without-scores"
            )
        work.append((folder, known, runs))
    made = []
    for folder, known, runs in work:
        if isinstance(known, Manifest):
            changed = card.refresh(folder, known, runs)
        else:
            changed = foreign_card.refresh(known, runs)
        tasks = [task for run in runs for task in run.tasks]
        made.append({"path": str(folder / README), "changed": changed, "tasks": tasks})
    if json:
        console.print_json(made)
        return
    for entry in made:
        typer.echo(f"{entry['path']} {'written' if entry['changed'] else 'is up to date'}")
