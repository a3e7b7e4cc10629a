"""`quantkit score`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import (
    AsJson,
    Datasets,
    Device,
    EngineArgs,
    Limit,
    MaxLength,
    Quiet,
    Revision,
    Seed,
    Server,
    Source,
    Tasks,
    TrustRemoteCode,
    Verbose,
    VllmPython,
    one_of,
    split,
    words,
)


def command(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Source models and checkpoint folders.")
    ],
    tasks: Tasks = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Compare with the source's own answers to these prompts."
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How to judge answers to --prompts: exact, json or tool-calls; default: per row.",
            callback=one_of("exact", "json", "tool-calls"),
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write NAME.json files here.")
    ] = None,
    limit: Limit = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Number of few-shot examples before each question."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sequences per batch; default: as many as fit."),
    ] = None,
    max_length: MaxLength = None,
    seed: Seed = 0,
    data: Datasets = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of cached answers.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Existing score file of the source to compare with."),
    ] = None,
    source: Source = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="POINTS",
            help="Sample questions at random until the interval is +-POINTS, such as 1.0pp.",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Engine: transformers, vllm (started for you), or llama.cpp for GGUF.",
            callback=one_of("transformers", "llama.cpp", "vllm"),
        ),
    ] = "transformers",
    python: VllmPython = None,
    engine_args: EngineArgs = "",
    server: Server = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask through the model's chat template.")
    ] = False,
    fewshot_as_multiturn: Annotated[
        bool,
        typer.Option(
            "--fewshot-as-multiturn", help="Give few-shot examples as turns of a conversation."
        ),
    ] = False,
    system_instruction: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System prompt.")
    ] = None,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Run code that the model writes, in a sandbox."),
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run lm-eval tasks on a model or on checkpoints."""
    from quantkit.calls.score import Chat, Models, ScoreOptions, Scoring
    from quantkit.cli import score_view, start

    asked = ScoreOptions.of(
        split(tasks) if tasks is not None else None,
        models,
        limit=limit,
        num_fewshot=num_fewshot,
        max_length=max_length,
        batch_size=batch_size,
        seed=seed,
        data=data,
        cache=cache,
        server=server,
        backend=backend,
        python=python,
        engine_args=tuple(words(engine_args)),
        prompts=prompts,
        judge=judge,
        chat=Chat(apply_chat_template, fewshot_as_multiturn, system_instruction),
        allow_code=allow_code,
    )
    of = Models(models, source, revision, trust_remote_code=trust_remote_code)
    wanted = None if until is None else _points(until)
    scored = start.run(Scoring(of, asked, out, baseline, wanted, device), quiet, verbose)
    score_view.show(scored, json, verbose)


def _points(text: str) -> float:
    """Half-width of an interval, as a fraction."""
    try:
        points = float(text.removesuffix("pp").strip())
    except ValueError:
        points = 0.0
    if not 0 < points < 50:
        raise typer.BadParameter(f"--until {text}: give points, such as 1.0pp")
    return points / 100
