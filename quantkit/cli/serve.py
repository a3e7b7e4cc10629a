"""`quantkit serve`."""

from pathlib import Path
from typing import Annotated

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


def command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint folder, a GGUF file, or a hub id.")
    ],
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="Engine flags; they override quantkit's."),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Kind of traffic: chat, batch or mixed.",
            callback=one_of("chat", "batch", "mixed"),
        ),
    ] = "chat",
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="auto, cpu, or a name from `quantkit gpus`.")
    ] = "auto",
    count: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of GPUs that share the model.")
    ] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar="N",
            help="Tokens per request, such as 16k; default: 8192, or what fits.",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Concurrent users; default: as many as fit."),
    ] = None,
    kv_cache: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="KV cache type: auto (the checkpoint's), or 16 or 8 bits.",
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
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; 0.0.0.0 listens on every interface."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port to listen on.")] = (
        8000
    ),
    gpu_utilization: Annotated[
        float,
        typer.Option(min=0, max=1, metavar="SHARE", help="Share of each GPU's memory to use."),
    ] = 0.9,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Python interpreter of vLLM's environment; default: this one."
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="llama.cpp's server; default: llama-server on the PATH."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Time limit for the server to become ready."),
    ] = 900.0,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the engine's log to this file.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Check the checkpoint first.")
    ] = True,
    once: Annotated[
        bool, typer.Option("--once", help="Stop after one answered request, as a smoke test.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the engine's command and stop.")
    ] = False,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Write deployment files instead: compose, k8s or grafana.",
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

    Prints the engine's command with the reason for every flag, starts it, waits until it is
    healthy, sends one real request, and serves until Ctrl-C.
    """
    from quantkit.calls import serve as calls
    from quantkit.cli import serving_view, start

    if emit is None and (image is not None or replicas is not None):
        hint = "--replicas" if image is None else "--image"
        raise typer.BadParameter("needs --emit", param_hint=hint)
    planning = calls.Planning(
        checkpoint,
        calls.Setup(
            profile, gpu, count, context, users, kv_cache, gpu_utilization, host, port, extra or []
        ),
        calls.Additions(draft, draft_tokens, draft_sampling, lora or [], max_loras, max_cpu_loras),
        calls.Engine(python, llama_server, is_needed=not (dry_run or emit)),
        calls.Files(emit, out or Path(), image, replicas, ttft, tpot, force),
    )
    view = serving_view.View(json)
    if emit is not None:
        files = start.run(calls.Emission(planning, check, dry_run), quiet)
        serving_view.show_files(files, only_named=dry_run)
    elif dry_run:
        view.show(start.ask(planning))
    else:
        start.run(calls.Serving(planning, view, timeout, log, check, once), quiet)
