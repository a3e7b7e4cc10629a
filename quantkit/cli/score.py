"""`quantkit score`."""

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
        list[str], typer.Argument(metavar="MODEL...", help="Source models and checkpoint folders.")
    ],
    tasks: Tasks = "wikitext,mmlu",
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write NAME.json files here.")
    ] = None,
    limit: Limit = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Examples shown before each question.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Sequences at a time; default: fitting.")
    ] = None,
    max_length: MaxLength = None,
    seed: Annotated[int, typer.Option(metavar="N", help="For few-shot examples.")] = 0,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run lm-eval tasks on a model or on checkpoints."""
    from quantkit.cli import console, start

    names = split(tasks)
    start.stay_offline_if(all(start.is_own(t) for t in names) and all(map(start.is_local, models)))
    from quantkit.score.harness import score
    from quantkit.storage import guarded, write_json

    targets = [start.scorable(name, revision, trust_remote_code) for name in models]
    start.refuse_same_names(targets)
    cards = []
    with console.progress(quiet, verbose) as progress:
        for target in targets:
            card = score(
                target,
                names,
                limit,
                num_fewshot,
                batch_size,
                max_length,
                seed,
                device,
                progress,
                trust_remote_code,
            )
            cards.append(card)
            if out is not None:
                with guarded(out):
                    out.mkdir(parents=True, exist_ok=True)
                write_json(out / card.file_name, card.to_json())
    if json:
        console.print_json([card.to_json() for card in cards])
        return
    console.print_table(
        ["model", "score", "value", "stderr", "n"],
        [
            [
                card.name,
                key,
                f"{s.value:.4f}",
                "" if s.stderr is None else f"{s.stderr:.4f}",
                f"{s.n:,}",
            ]
            for card in cards
            for key, s in card.scores.items()
        ],
        words=(0, 1),
    )
