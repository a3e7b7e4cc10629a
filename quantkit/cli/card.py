"""`quantkit card`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson, Checkpoints


def command(
    checkpoints: Checkpoints,
    scores: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A score file, or a folder of them. Repeatable."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report.json that covers the checkpoint.")
    ] = None,
    without_scores: Annotated[
        bool, typer.Option("--without-scores", help="Drop the card's existing scores.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Rewrite a checkpoint's model card.

    Keeps what people wrote into its README.md, and takes scores only of the folder's own files.
    Writes the card of a hub id into a folder of its name here.
    """
    from quantkit.calls.report import Describing
    from quantkit.cli import console, start

    call = Describing(checkpoints, scores or [], report, without_scores)
    cards = start.ask(call)
    if json:
        console.print_json([card.to_json() for card in cards])
        return
    for card in cards:
        typer.echo(f"{card.path} {'written' if card.changed else 'is up to date'}")
