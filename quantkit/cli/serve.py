"""`quantkit serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import (
    AlertFirst,
    AlertToken,
    AsJson,
    DraftSampling,
    DraftText,
    DraftTokens,
    EmitImage,
    EmitTo,
    Force,
    Lora,
    MaxCpuLoras,
    MaxLoras,
    Quiet,
    Replicas,
    one_of,
    tokens,
)

if TYPE_CHECKING:
    from quantkit.progress import Progress
    from quantkit.serving.fleet import Fleet
    from quantkit.serving.plan import Plan
    from quantkit.serving.program import Program

PREVIEW = 60


def command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint's folder, or a GGUF file.")
    ],
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Flags for the engine, in place of ours."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Set up for chat, batch or mixed traffic.",
            callback=one_of("chat", "batch", "mixed"),
        ),
    ] = "chat",
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, or one of `quantkit gpus`.")
    ] = "auto",
    count: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs that share the model.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar="N",
            help="Tokens of a request, such as 16k; default: 8192, or what fits.",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="At the same time; default: as many as fit."),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="auto (as the checkpoint says), 16 or 8 bits.",
            callback=one_of("auto", "16", "8"),
        ),
    ] = "auto",
    draft: DraftText = None,
    draft_tokens: DraftTokens = None,
    draft_sampling: DraftSampling = None,
    lora: Lora = None,
    max_loras: MaxLoras = None,
    max_cpu_loras: MaxCpuLoras = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0: to everybody.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Where to listen.")] = (
        8000
    ),
    gpu_utilization: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="SHARE", help="Share of each GPU's memory to use."),
    ] = 0.9,
    python: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The Python of vLLM's environment; default: this one."),
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option(metavar="FILE", help="llama.cpp's server; default: on the PATH.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long a start may take.")
    ] = 900.0,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what the engine writes.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Check the folder first.")
    ] = True,
    once: Annotated[
        bool, typer.Option("--once", help="End after one answered request, as a test.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Write files instead: compose, k8s or grafana.",
            callback=one_of("compose", "k8s", "grafana"),
        ),
    ] = None,
    out: EmitTo = None,
    image: EmitImage = None,
    replicas: Replicas = None,
    ttft: AlertFirst = None,
    tpot: AlertToken = None,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Serve a checkpoint with vLLM, or a GGUF file with llama.cpp.

    Prints the engine's command with the reason of every flag, starts it, waits until it is
    healthy, sends one real request, and stays until Ctrl-C.
    """
    from dataclasses import replace

    from quantkit.cli import console, serving_view
    from quantkit.serving import adapters, device, images, plan, program, server, target
    from quantkit.serving import draft as drafts

    fleet = _fleet(replicas, ttft, tpot, image)
    if emit is not None:
        from quantkit.serving import emit as emitting

        emitting.check(emit, out or Path(), fleet, force)
    elif image is not None or replicas is not None:
        hint = "--replicas" if image is None else "--image"
        raise typer.BadParameter("goes with --emit", param_hint=hint)
    model = target.open_target(checkpoint)
    loras = adapters.parse(lora or [], model.is_gguf, max_loras, max_cpu_loras)
    demand = plan.Demand(
        gpu=device.find(gpu),
        count=count,
        context=context,
        users=users,
        profile=profile,
        kv_bits=plan.kv_bits(kv_cache),
        utilisation=gpu_utilization,
        draft=drafts.parse(draft, model, draft_tokens, sampling=draft_sampling),
        adapters=loras,
        host=host,
        port=port,
    )
    made = plan.make(model, demand).with_extra(extra or [])
    engine = None
    # A plan is made before there is an engine; where one is named, it is that one's.
    if python or llama_server or not (dry_run or emit):
        engine = program.find(made.engine, demand.gpu, python, llama_server)
    elif dry_run:
        engine = program.look(made.engine)
        if engine is None:
            made = made.with_note(
                f"{program.missing(made.engine)} here, so this is how it is called where it is"
            )
    if dry_run and emit is None:
        if json:
            console.print_json(made.to_json(engine.words if engine else None))
        else:
            serving_view.show(made, engine)
        return
    files = {}
    if emit is not None:
        if image is None and python is not None and engine is not None and emit != "grafana":
            fleet = replace(fleet, image=images.tag_of(engine.version))
        files = serving_view.made_files(made, emit, out or Path(), fleet, force)
    else:
        server.refuse_taken(*made.address)
    with console.progress(quiet) as progress:
        if check:
            from quantkit.cli import start

            start.stay_offline_if(True)
            from quantkit.serving.check import check as check_folder

            check_folder(model, progress)
        if engine is None or emit is not None:
            serving_view.write_files(files, only_named=dry_run)
            return
        if not json:
            serving_view.show(made, engine)
        _serve(made, engine, timeout, log, once, json, progress)


def _fleet(replicas: str | None, ttft: str | None, tpot: str | None, image: str | None) -> "Fleet":
    """What files are to say beside the plan."""
    from quantkit.engine.durations import seconds
    from quantkit.serving.fleet import SLOW_TTFT, Fleet, Targets
    from quantkit.serving.fleet import replicas as parsed

    least, most = parsed(replicas)
    targets = Targets(seconds(ttft, "--ttft") or SLOW_TTFT, seconds(tpot, "--tpot"))
    return Fleet(least, most, targets, image, is_scaled=replicas is not None)


def _serve(
    made: "Plan",
    engine: "Program",
    timeout: float,
    log: Path | None,
    once: bool,
    json: bool,
    progress: "Progress",
) -> None:
    from quantkit.cli import console
    from quantkit.serving import server

    with server.running(made, engine, timeout, progress, log) as running:
        answer = running.ask()
        if json:
            console.print_json(
                {
                    **made.to_json(engine.words),
                    "version": engine.named,
                    "url": running.url,
                    "start_seconds": running.seconds,
                    "answer": answer.text,
                    "answer_seconds": answer.seconds,
                }
            )
        else:
            shown = repr(answer.text if len(answer.text) <= PREVIEW else answer.text[:PREVIEW])
            typer.echo(
                f"\n{engine.named} was ready after {running.seconds:.0f} s and "
                f"answered {server.PROMPT!r} in {answer.seconds:.1f} s with:\n  {shown}\n"
            )
            typer.echo(f"Call it:\n{server.curl(made, running.url)}")
        if once:
            return
        try:
            progress.note(f"\nserving at {running.url}/v1 until Ctrl-C")
            running.stay()
        except KeyboardInterrupt:
            progress.note("ending the server")
    progress.note("ended")
