"""`quantkit recommend`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import (
    AsJson,
    DraftSampling,
    DraftText,
    DraftTokens,
    EmitImage,
    EmitTo,
    Force,
    HostBandwidth,
    HostMemory,
    Lora,
    MaxCpuLoras,
    MaxLoras,
    Replicas,
    one_of,
    tokens,
)
from quantkit.errors import EXIT_GATE


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders, hub ids, config.json files, or sizes such as 70B; several: compared.",
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU, several with commas, `cpu`, `auto` or `all`."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="GPUs that share it; default: 1.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tensor-parallel size; default: the best."),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Pipeline-parallel size; default: the best."),
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Keep experts whole; for MoE models.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar="N",
            help="Tokens of prompt and answer, such as 16k; default: 8192, or all it takes.",
        ),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option(parser=tokens, metavar="N", help="Tokens of the answer; default: a quarter."),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(parser=tokens, metavar="N", help="Tokens that all prompts begin with."),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="At a time; default: 1; for throughput, all that fit."
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="latency (default), throughput, memory or quality.",
            callback=one_of("latency", "throughput", "memory", "quality"),
        ),
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Require first tokens within, such as 1s."),
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Require each further token within, such as 50ms."),
    ] = None,
    min_quality: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="SHARE", help="Of the source's accuracy; default: 0.97."
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A report.json of the model; one for each of several."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of a GPU that is not listed: 24GB, 23034MiB."),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of that GPU: 1008GB/s.")
    ] = None,
    capability: Annotated[
        str | None, typer.Option(metavar="X.Y", help="Of that GPU: 8.9, or gfx942 of AMD's.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(metavar="N", help="Of that GPU, dense, in 16 bits.")
    ] = None,
    host_memory: HostMemory = None,
    host_bandwidth: HostBandwidth = None,
    gpu_hour: Annotated[
        float | None,
        typer.Option(min=0, metavar="PRICE", help="Of one GPU: adds what tokens cost."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prices of GPUs an hour with their date, as YAML."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A bench.json: what was measured replaces estimates."),
    ] = None,
    draft: DraftText = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Of the draft: a share such as 0.7, or `quantkit draft` JSON."
        ),
    ] = None,
    draft_tokens: DraftTokens = None,
    draft_sampling: DraftSampling = None,
    lora: Lora = None,
    max_loras: MaxLoras = None,
    max_cpu_loras: MaxCpuLoras = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for chat, batch or mixed traffic.",
            callback=one_of("chat", "batch", "mixed"),
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Write the plan's files: compose, k8s or grafana.",
            callback=one_of("compose", "k8s", "grafana"),
        ),
    ] = None,
    out: EmitTo = None,
    image: EmitImage = None,
    replicas: Replicas = None,
    force: Force = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything as a page.")
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A table of `quantkit sensitivity`: what mixed formats make of the room.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Say which format to serve a model in on a GPU, and why; exit 1 where none serves."""
    from quantkit.calls import recommend as calls
    from quantkit.calls.serve import Additions, Files
    from quantkit.cli import recommend_view, serving_view, start

    for given, option in ((image, "--image"), (replicas, "--replicas")):
        if emit is None and given is not None:
            raise typer.BadParameter("goes with --emit", param_hint=option)
    if draft is None and (acceptance or draft_tokens or draft_sampling):
        raise typer.BadParameter("goes with --draft", param_hint="--acceptance")
    call = calls.Advising(
        models,
        calls.Place(gpu, memory, bandwidth, capability, tflops, host_memory, host_bandwidth),
        calls.Load(
            count,
            tensor_parallel,
            pipeline_parallel,
            expert_parallel,
            context,
            answer,
            shared_prefix,
            users,
            profile,
        ),
        calls.Aims(objective, min_quality, ttft, tpot),
        calls.Evidence(report or [], bench, gpu_hour, prices, sensitivity),
        Additions(draft, draft_tokens, draft_sampling, lora or [], max_loras, max_cpu_loras),
        acceptance,
        Files(emit, out or Path(), image, replicas, force=force),
        html,
    )
    advised = start.ask(call)
    recommend_view.show(advised, html, json)
    if emit is not None:
        serving_view.tell_files(advised.emitted())
    if not any(one.chosen for one in advised.answers.found):
        raise typer.Exit(EXIT_GATE)  # so that a script can tell
