"""`quantkit bench`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson, EngineArgs, Force, Quiet, one_of, words


def command(
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...", help="Model folders, hub ids, `demo`, or GGUF files for llama.cpp."
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="vllm, llama.cpp, or server (one that is already running).",
            callback=one_of("vllm", "llama.cpp", "server"),
        ),
    ] = "vllm",
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of the running server.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model to ask for, where the server has several."),
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Python interpreter of vLLM's environment.")
    ] = None,
    llama_server: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="llama.cpp's server; default: llama-server on the PATH."),
    ] = None,
    engine_args: EngineArgs = "",
    offline: Annotated[
        bool, typer.Option("--offline", help="Send batches to vLLM in process, without a server.")
    ] = False,
    prompt: Annotated[
        str, typer.Option(metavar="N,M", help="Prompt length in tokens (random tokens).")
    ] = "512",
    output: Annotated[
        str, typer.Option(metavar="N,M", help="Answer length in tokens, exact.")
    ] = "128",
    shared_prefix: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Length of the prefix that all prompts share, in tokens."
        ),
    ] = 0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Recorded traffic to replay (JSON lines).")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="SET", help="Take prompts from a calibration set.")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Concurrent users, each waiting for its answer (closed loop)."
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,S", help="Requests per second (open loop).")
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Arrival process of --rate: poisson or constant.",
            callback=one_of("poisson", "constant"),
        ),
    ] = "poisson",
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Requests per repetition; default: depends on the load."
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Warm-up requests; default: one per user."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Number of repetitions.")] = 1,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG=A,B", help="Serving flags to try, in all combinations. Repeatable."
        ),
    ] = None,
    ttft: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target for the first token, such as 500ms.")
    ] = None,
    tpot: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target for each later token, such as 30ms.")
    ] = None,
    attain: Annotated[
        float,
        typer.Option(
            min=1, max=100, metavar="PERCENT", help="Share of requests that must meet the targets."
        ),
    ] = 99.0,
    gpu_hour: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="PRICE", help="Price of one GPU per hour, for the cost per token."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of GPUs that serve; default: from the engine's flags, or 1.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time limit of one request.")
    ] = 300.0,
    start_timeout: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Time limit for an engine to become ready."),
    ] = 900.0,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed for prompts and arrivals.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Write bench.json, .csv and .html here."),
    ] = None,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure latency, throughput, memory and cost of serving.

    Flags for --sweep: max_num_seqs, max_num_batched_tokens, kv_cache_dtype, prefix_caching,
    chunked_prefill (on, off), gpu_memory_utilization, tensor_parallel, speculative (none, ngram:K,
    suffix:K, mtp:K, DIR:K, eagle:DIR:K, eagle3:DIR:K, medusa:DIR:K). Several checkpoints get the
    same requests at the same times and are compared request by request.
    """
    from quantkit.calls import bench as calls
    from quantkit.cli import bench_view, start

    _check(backend, server, checkpoints or [], sweep or [], offline)
    if offline and (shared_prefix or requests):
        raise typer.BadParameter(
            "--offline makes its own prompts, as many as --concurrency: leave out --shared-prefix "
            "and --requests",
            param_hint="--offline",
        )
    if model is not None and backend != "server":
        raise typer.BadParameter("needs --backend server", param_hint="--model")
    call = calls.Measuring(
        checkpoints or [],
        calls.Engine(
            backend,
            server,
            model,
            python,
            llama_server,
            words(engine_args),
            start_timeout,
            offline,
        ),
        calls.Traffic(
            prompt,
            output,
            shared_prefix,
            trace,
            calibration,
            concurrency,
            rate,
            arrivals,
            requests,
            warmup,
            repeat,
            timeout,
            seed,
        ),
        calls.Goal(ttft, tpot, attain, gpu_hour, gpus),
        sweep or [],
        out,
        force,
    )
    bench_view.show(start.run(call, quiet), json)


def _check(
    backend: str, server: str | None, folders: list[Path], sweep: list[str], offline: bool
) -> None:
    """Refuse conflicting options, before anything is loaded."""
    if backend == "server":
        if not server:
            raise typer.BadParameter("name the server with --server URL", param_hint="--backend")
        if len(folders) > 1:
            raise typer.BadParameter(
                "a server has one model: leave out the folders", param_hint="DIR"
            )
        if sweep:
            raise typer.BadParameter(
                "a running server cannot change its flags: use --backend vllm", param_hint="--sweep"
            )
    elif server:
        raise typer.BadParameter("needs --backend server", param_hint="--server")
    elif not folders:
        raise typer.BadParameter("name a model's folder", param_hint="DIR")
    if offline and backend != "vllm":
        raise typer.BadParameter("needs --backend vllm", param_hint="--offline")
