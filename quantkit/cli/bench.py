"""`quantkit bench`."""

import os
import shlex
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import AsJson, Force, Quiet, one_of
from quantkit.errors import EngineError, UsageError

if TYPE_CHECKING:
    from quantkit.bench.record import Bench

WIDE = 170


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
    from quantkit.calls import early, hub
    from quantkit.cli import console, start

    _check(backend, server, checkpoints or [], sweep or [], offline)
    if offline and (shared_prefix or requests):
        raise typer.BadParameter(
            "a batch has prompts of its own, --concurrency of them: leave out --shared-prefix and "
            "--requests",
            param_hint="--offline",
        )
    if model is not None and backend != "server":
        raise typer.BadParameter("goes with --backend server", param_hint="--model")
    start.stay_offline_if(not hub.set_needs(calibration))
    from quantkit.bench import settings
    from quantkit.bench.model import Model

    grid = settings.grid(sweep or [])
    for path in checkpoints or []:
        Model.of(path)
    early.file(trace)
    early.calibration(calibration)
    early.output(out)
    from quantkit.bench import asking, files, run
    from quantkit.bench.engines import Program, n_gpus
    from quantkit.bench.measure import Plan
    from quantkit.bench.workloads import Recorded
    from quantkit.storage import output_folder

    further = _words(engine_args)
    if out is not None:
        files.refuse_existing(out, force)
    wanted = asking.target(ttft, tpot, attain)
    served = run.models(checkpoints or [])
    holding = output_folder(out) if out is not None else nullcontext()
    with holding, console.progress(quiet) as progress:
        first = served[0].path if served else None
        lengths = asking.Lengths(prompt, output, shared_prefix)
        recording = asking.Recording(trace, calibration, requests, seed)
        sources = asking.sources(lengths, recording, first, progress)
        recorded = sources[0] if isinstance(sources[0], Recorded) else None
        if offline and recorded:
            raise UsageError("--offline measures fixed lengths; leave the trace or set to a server")
        plan = Plan(
            sources,
            asking.loads(concurrency, rate, arrivals, recorded, offline),
            requests,
            warmup,
            repeat,
            timeout,
            seed,
            wanted,
            gpu_hour,
            gpus or n_gpus(further),
            os.environ.get("OPENAI_API_KEY"),
        )
        if backend == "server":
            one = served[0] if served else None
            bench = run.server_run(server or "", one, model, plan, progress)
        else:
            program = Program.find(backend, python, llama_server, further, start_timeout)
            kept = run.Kept()
            if out is not None:
                kept = run.Kept(files.log_folder(out), partial(files.write, out=out))
            bench = run.engine_run(program, served, grid, plan, progress, offline, kept)
        if out is not None:
            files.write(bench, out)
    if json:
        console.print_json(bench.to_json())
    else:
        _show(bench)
    _complain(bench)


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


def _show(bench: "Bench") -> None:
    """A table a model, then what failed and what to serve with."""
    from quantkit.bench import compare, table
    from quantkit.cli import console

    narrow = shutil.get_terminal_size().columns < WIDE
    console.say(table.header(bench))
    for name in dict.fromkeys(row.model for row in bench.rows):
        rows = [row for row in bench.rows if row.model == name]
        facts = table.facts(rows)
        console.say(f"\n{name}: {facts}" if facts else f"\n{name}")
        for found in (table.figures(rows, narrow), table.engine(rows, narrow)):
            if found.rows:
                console.print_table(found.titles, found.rows, words=found.words)
    failed = [
        (f"{row.model}, {row.load_name}", f"{n} {kind}: {row.failure_examples.get(kind, '')}")
        for row in bench.rows
        for kind, n in row.failures.items()
    ]
    if failed:
        console.print_lines("Failed requests", failed)
    if bench.refusals:
        refused = [
            (" ".join([one.model, *(f"{k}={v}" for k, v in one.setting.items())]), one.brief)
            for one in bench.refusals
        ]
        console.print_lines("Refused", refused)
    if bench.target or any(row.setting for row in bench.rows):
        chosen = [(choice.model, table.chosen(choice)) for choice in bench.choices]
        console.print_lines("Serve with", chosen)
    if bench.comparisons:
        told = [(f"{one.model}, {one.load}", compare.words(one)) for one in bench.comparisons]
        console.print_lines("Compared with the first, request by request", told)
    if bench.notes:
        console.print_lines("Notes", [("-", note) for note in bench.notes])


def _complain(bench: "Bench") -> None:
    """A model that was never measured is an error, also where others were."""
    measured = {row.model for row in bench.rows if row.n_ok}
    refused = {one.model: one.reason for one in bench.refusals if one.model not in measured}
    for row in bench.rows:
        if row.model not in measured:
            refused.setdefault(row.model, "no request was answered")
    if refused:
        told = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise EngineError(f"not measured: {told}")
