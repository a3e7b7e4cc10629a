"""`quantkit score`."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit import metrics
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
    one_of,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from quantkit.progress import Progress
    from quantkit.scoring.evaluation import Evaluation
    from quantkit.scoring.harness import Asked
    from quantkit.scoring.scorecard import Scorecard


def command(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Source models and checkpoint folders.")
    ],
    tasks: Tasks = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Follow the source's own answers to these prompts."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Judge answers to --prompts: exact, json or tool-calls; default: by row.",
            callback=one_of("exact", "json", "tool-calls"),
        ),
    ] = None,
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
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Scores of the source, from before, to compare with."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="What checkpoints of other tools were made from."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="POINTS", help="Random questions until +-POINTS, such as 1.0pp."),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What computes: transformers, or llama.cpp for GGUF.",
            callback=one_of("transformers", "llama.cpp"),
        ),
    ] = "transformers",
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask an engine that serves MODEL, such as vLLM."),
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask in the model's chat format.")
    ] = False,
    fewshot_as_multiturn: Annotated[
        bool,
        typer.Option("--fewshot-as-multiturn", help="Show examples as turns of a conversation."),
    ] = False,
    system_instruction: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System prompt of the conversation.")
    ] = None,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Let tasks run code that the model wrote, in a box."),
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run lm-eval tasks on a model or on checkpoints."""
    from quantkit.cli import console, early, start
    from quantkit.scoring.suites import by_default

    names = split(tasks) if tasks is not None else []
    if tasks is None and prompts is None:
        names = list(by_default(models))
    at_home = data is not None or all(start.is_own(t) for t in names)
    named = [*models, *([source] if source is not None else [])]
    start.stay_offline_if(at_home and all(map(start.is_local, named)))
    if server is not None and len(models) != 1:
        raise typer.BadParameter("a server serves one model: give its folder alone")
    if judge is not None and prompts is None:
        raise typer.BadParameter("--judge is for answers to --prompts: give a file of them")
    wanted = None if until is None else _points(until)
    early.models(named, revision if source is None else None)
    early.tasks(names if tasks is not None else [], data, prompts)
    early.output(out)
    from quantkit.scoring.evaluation import Evaluation

    before = None if baseline is None else Evaluation.read(baseline)
    start.load_lean(quiet)
    from quantkit import opening
    from quantkit.model.source import ModelSource
    from quantkit.scoring.evaluation import Evaluation
    from quantkit.scoring.harness import Asked, evaluate
    from quantkit.scoring.lmeval import Chat
    from quantkit.storage import output_folder

    asked = Asked(
        tuple(names),
        limit,
        num_fewshot,
        max_length,
        batch_size,
        seed,
        data,
        cache=cache,
        server=server,
        backend=backend,
        prompts=prompts,
        judge=judge,
        chat=Chat(apply_chat_template, fewshot_as_multiturn, system_instruction),
        allow_code=allow_code,
    )
    original = None if source is None else ModelSource.open(source, None, trust_remote_code)
    found = opening.find_all(models, revision, trust_remote_code, original)
    targets = opening.paired(found, original)
    start.refuse_same_names(targets)
    holding = output_folder(out) if out is not None else nullcontext()
    with holding, console.progress(quiet, verbose) as progress:

        def run(asked: Asked) -> list[Evaluation]:
            return [
                _written(evaluate(target, asked, device, progress, trust_remote_code), out)
                for target in targets
            ]

        evaluations = run(asked) if wanted is None else _until(run, asked, wanted, progress)
    cards = [evaluation.card for evaluation in evaluations]
    if json:
        console.print_json([card.to_json() for card in cards])
        return
    every = [(card, key, score) for card in cards for key, score in card.scores.items()]
    shown = [row for row in every if verbose or not (_is_part(*row[:2]) or _is_detail(*row[:2]))]
    from_cache = any(_cached(card, key) for card, key, _ in shown)
    console.print_table(
        ["model", "score", "value", "stderr", "n", *(["cached"] if from_cache else [])],
        [
            [
                card.name,
                key,
                f"{s.value:.4f}",
                "" if s.stderr is None else f"{s.stderr:.4f}",
                f"{s.n:,}",
                *([_cached(card, key)] if from_cache else []),
            ]
            for card, key, s in shown
        ],
        words=(0, 1),
    )
    if hidden := len(every) - len(shown):
        console.say(f"{hidden} more with -v, and in --json.")
    both = [*([before] if before is not None else []), *evaluations]
    if len(both) > 1 and sum(e.card.recipe is None for e in both) == 1:
        start.show_verdicts(both)


def _is_detail(card: "Scorecard", key: str) -> bool:
    """Whether a score says once more what another says."""
    metric = metrics.of(key)
    return metric.detail or (card.recipe is None and metric.against_source)


def _cached(card: "Scorecard", key: str) -> str:
    """How much of a score comes from answers that an earlier run kept; empty where none does."""
    share = card.cached.get(key.rpartition("/")[0], 0.0)
    return "" if not share else "all" if share == 1 else f"{max(share, 0.01):.0%}"


def _is_part(card: "Scorecard", key: str) -> bool:
    """Whether a score is that of one task of a group, of which there may be dozens."""
    task = key.rpartition("/")[0]
    inside = {member for members in card.groups.values() for member in members}
    return task in inside and task not in card.settings.tasks


def _written(evaluation: "Evaluation", out: Path | None) -> "Evaluation":
    if out is not None:
        evaluation.write(out)
    return evaluation


def _points(text: str) -> float:
    """Half the width of an interval, as a fraction."""
    try:
        points = float(text.removesuffix("pp").strip())
    except ValueError:
        points = 0.0
    if not 0 < points < 50:
        raise typer.BadParameter(f"--until {text}: give points, such as 1.0pp")
    return points / 100


def _until(
    run: "Callable[[Asked], list[Evaluation]]", asked: "Asked", wanted: float, progress: "Progress"
) -> "list[Evaluation]":
    from quantkit.scoring.harness import sizes_of
    from quantkit.scoring.until import score_until

    reached = score_until(run, asked, sizes_of(asked), wanted, progress.note)
    width = f"+-{100 * reached.half_width:.2f} points with {reached.n_questions:,} questions"
    if reached.half_width > wanted:
        progress.note(
            f"{width}, all that there are; +-{100 * wanted:g} points would take about "
            f"{reached.needed:,}"
        )
    else:
        progress.note(f"{width}: narrow enough")
    return reached.evaluations
