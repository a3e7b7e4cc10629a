"""`quantkit bench`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson, Force, Quiet, one_of


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
            help="vllm, llama.cpp, or server: one that runs.",
            callback=one_of("vllm", "llama.cpp", "server"),
        ),
    ] = "vllm",
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Of the running server.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its model, where it serves several.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The Python that has vLLM.")
    ] = None,
    llama_server: Annotated[
        str | None, typer.Option(metavar="PATH", help="llama.cpp's server; default: on the path.")
    ] = None,
    engine_args: Annotated[
        str, typer.Option(metavar="TEXT", help="Further flags, given to the engine as they are.")
    ] = "",
    offline: Annotated[
        bool, typer.Option("--offline", help="Batches straight into vLLM, with no server between.")
    ] = False,
    prompt: Annotated[
        str, typer.Option(metavar="N,M", help="Tokens of prompts, random ones.")
    ] = "512",
    output: Annotated[
        str, typer.Option(metavar="N,M", help="Tokens of answers, to the last one.")
    ] = "128",
    shared_prefix: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens that all prompts begin with.")
    ] = 0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Traffic to replay, as JSON lines.")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="SET", help="Prompts of a calibration set.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,M", help="Users who wait for each answer.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R,S", help="Requests a second, come what may.")
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Of --rate: poisson or constant.",
            callback=one_of("poisson", "constant"),
        ),
    ] = "poisson",
    requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="A repetition; default: by the load.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Requests before; default: one a user.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.")] = 1,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="FLAG=A,B", help="Serving flags to try, all combinations; repeats."),
    ] = None,
    ttft: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target: first token, such as 500ms.")
    ] = None,
    tpot: Annotated[
        str | None, typer.Option(metavar="TIME", help="Target: each further token, such as 30ms.")
    ] = None,
    attain: Annotated[
        float, typer.Option(min=1, max=100, metavar="PERCENT", help="Of requests within it.")
    ] = 99.0,
    gpu_hour: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of one GPU, for cost of tokens.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="That serve; default: as flags say, or 1."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="For one request.")
    ] = 300.0,
    start_timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For an engine to be ready.")
    ] = 900.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of prompts and arrivals.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="Write bench.json, .csv and .html here."),
    ] = None,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure how fast checkpoints serve: latency, throughput, memory and cost.

    Flags to --sweep: max_num_seqs, max_num_batched_tokens, kv_cache_dtype, prefix_caching,
    chunked_prefill (on, off), gpu_memory_utilization, tensor_parallel, speculative (none, ngram:K,
    suffix:K, mtp:K, DIR:K, eagle:DIR:K, eagle3:DIR:K, medusa:DIR:K). Several checkpoints get the
    same requests at the same times, and are compared request by request.
    """
    from quantkit.calls import bench as calls
    from quantkit.cli import bench_view, start

    _check(backend, server, checkpoints or [], sweep or [], offline)
    if offline and (shared_prefix or requests):
        raise typer.BadParameter(
            "a batch has prompts of its own, --concurrency of them: leave out --shared-prefix and "
            "--requests",
            param_hint="--offline",
        )
    if model is not None and backend != "server":
        raise typer.BadParameter("goes with --backend server", param_hint="--model")
    call = calls.Measuring(
        checkpoints or [],
        calls.Engine(
            backend,
            server,
            model,
            python,
            llama_server,
            _words(engine_args),
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
    """What does not go together, before anything is loaded."""
    if backend == "server":
        if not server:
            raise typer.BadParameter("name the server with --server URL", param_hint="--backend")
        if len(folders) > 1:
            raise typer.BadParameter("a server serves one of them", param_hint="DIR")
        if sweep:
            raise typer.BadParameter("flags belong to its start: use vllm", param_hint="--sweep")
    elif server:
        raise typer.BadParameter("goes with --backend server", param_hint="--server")
    elif not folders:
        raise typer.BadParameter("name a model's folder", param_hint="DIR")
    if offline and backend != "vllm":
        raise typer.BadParameter("goes with --backend vllm", param_hint="--offline")


def _words(engine_args: str) -> list[str]:
    try:
        return shlex.split(engine_args)
    except ValueError as error:
        raise typer.BadParameter(str(error).lower(), param_hint="--engine-args") from error
