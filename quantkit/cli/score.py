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
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Datasets without a hub: a folder tree like a hub's."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where answers are kept for next time.")
    ] = None,
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
    at_home = data is not None or all(start.is_own(t) for t in names)
    start.stay_offline_if(at_home and all(map(start.is_local, models)))
    from quantkit.score.harness import Asked, evaluate

    asked = Asked(tuple(names), limit, num_fewshot, max_length, batch_size, seed, data, cache=cache)
    targets = [start.scorable(name, revision, trust_remote_code) for name in models]
    start.refuse_same_names(targets)
    cards = []
    with console.progress(quiet, verbose) as progress:
        for target in targets:
            evaluation = evaluate(target, asked, device, progress, trust_remote_code)
            cards.append(evaluation.card)
            if out is not None:
                evaluation.write(out)
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
