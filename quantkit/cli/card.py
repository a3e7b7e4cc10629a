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

    Keeps hand-written text in README.md, and includes only scores of the folder's own files. For a
    hub id, writes the card to a local folder of that name.
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
