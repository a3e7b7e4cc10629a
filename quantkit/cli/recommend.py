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
    one_objective,
    one_of,
    tokens,
)
from quantkit.errors import EXIT_GATE


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders, hub ids, config.json files, or sizes such as 70B; several are compared.",
        ),
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A GPU's name (repeatable, or several with commas), `cpu`, `auto` or `all`.",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of GPUs that share the model; default: 1."),
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
        bool,
        typer.Option(
            "--expert-parallel", help="Expert parallel: place whole experts on GPUs (MoE models)."
        ),
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar="N",
            help="Tokens of prompt and answer, such as 16k; default: 8192, or the model's context.",
        ),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar="N",
            help="Tokens of the answer; default: a quarter of the context.",
        ),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar="N",
            help="Length of the prefix that all prompts share, in tokens.",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Concurrent users; default: 1, or all that fit for throughput."
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="What to optimise: latency (default), throughput, memory or quality.",
            callback=one_objective,
        ),
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Longest time to the first token, such as 1s."),
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Longest time per later token, such as 50ms."),
    ] = None,
    min_quality: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1,
            metavar="SHARE",
            help="Share of the source's accuracy to keep; default: 0.97.",
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A report.json of the model; with several models, one for each."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of a GPU that is not listed, such as 24GB or 23034MiB."
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Memory bandwidth of that GPU, such as 1008GB/s."),
    ] = None,
    capability: Annotated[
        str | None,
        typer.Option(
            metavar="X.Y", help="Compute capability of that GPU, such as 8.9, or gfx942 for AMD."
        ),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(metavar="N", help="Dense 16-bit TFLOPS of that GPU.")
    ] = None,
    host_memory: HostMemory = None,
    host_bandwidth: HostBandwidth = None,
    gpu_hour: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="PRICE", help="Price of one GPU per hour; adds the cost per token."
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file of hourly GPU prices with their date."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A bench.json; its measurements replace estimates."),
    ] = None,
    draft: DraftText = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Acceptance rate of the draft, such as 0.7, or the JSON of `quantkit draft`.",
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
            help="Kind of traffic: chat, batch or mixed.",
            callback=one_of("chat", "batch", "mixed"),
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Write deployment files of the plan: compose, k8s or grafana.",
            callback=one_of("compose", "k8s", "grafana"),
        ),
    ] = None,
    out: EmitTo = None,
    image: EmitImage = None,
    replicas: Replicas = None,
    force: Force = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the full answer as an HTML page.")
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The output of `quantkit sensitivity`; adds what mixed formats would gain.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Recommend a format for serving a model on a GPU. Exits with 1 if none fits."""
    from quantkit.calls import recommend as calls
    from quantkit.calls.serve import Additions, Files
    from quantkit.cli import recommend_view, serving_view, start

    for given, option in ((image, "--image"), (replicas, "--replicas")):
        if emit is None and given is not None:
            raise typer.BadParameter("needs --emit", param_hint=option)
    if draft is None and (acceptance or draft_tokens or draft_sampling):
        raise typer.BadParameter("needs --draft", param_hint="--acceptance")
    named = ",".join(gpu) if gpu else None
    call = calls.Advising(
        models,
        calls.Place(named, memory, bandwidth, capability, tflops, host_memory, host_bandwidth),
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
        serving_view.show_files(advised.emitted())
    if not any(one.chosen for one in advised.answers.found):
        raise typer.Exit(EXIT_GATE)  # for scripts
