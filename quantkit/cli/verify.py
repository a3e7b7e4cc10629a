"""`quantkit verify`."""

from typing import Annotated

import typer

from quantkit.cli.options import (
    AsJson,
    Checkpoints,
    Device,
    Quiet,
    Revision,
    Server,
    Source,
    TrustRemoteCode,
    Verbose,
    VllmPython,
    one_of,
)


def command(
    checkpoints: Checkpoints,
    source: Source = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="files, or vllm to also load the checkpoint in the engine.",
            callback=one_of("files", "vllm"),
        ),
    ] = "files",
    level: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="With vllm: config (no weights), generate or logprobs.",
            callback=one_of("config", "generate", "logprobs"),
        ),
    ] = "logprobs",
    python: VllmPython = None,
    server: Server = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model's name on the server; default: its folder's name."
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of prompts for level logprobs.")
    ] = 64,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="vLLM's dtype: auto, bfloat16 or float16.")
    ] = "auto",
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Engines to run at once on one GPU.")
    ] = 1,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Time limit per engine.")
    ] = 600.0,
    predicted_for: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ENGINE",
            help="Predict from config and headers what vllm or llama.cpp will do.",
            callback=one_of("vllm", "llama.cpp"),
        ),
    ] = None,
    for_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="With --for: the engine's version, such as 0.26."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --for: the GPU, to name the kernel of each layer."),
    ] = None,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check that checkpoints from any tool are sound.

    Checks files against their hashes, tensors against the recipe or the config that declares them,
    and weights against the source. Exit code 1: something is wrong; 3: the check could not run.
    --backend vllm also loads each checkpoint in the engine, generates, and compares its
    log-probabilities with ours; verified.json in the checkpoint keeps the result. --for predicts
    from an engine's own rules what it will do: in seconds, without starting it.
    """
    from quantkit.calls import verify as calls
    from quantkit.cli import prediction_view, start, verify_view

    if predicted_for is not None:
        if backend != "files" or server is not None or source is not None:
            raise typer.BadParameter("cannot be combined with --backend, --server or --source")
        rules = calls.RuleCheck(checkpoints, predicted_for, for_version, gpu)
        prediction_view.end(start.run(rules, quiet, verbose), json)
        return
    if for_version is not None or gpu is not None:
        raise typer.BadParameter("--for-version and --gpu need --for")
    if model is not None and server is None:
        raise typer.BadParameter("needs --server", param_hint="--model")
    of = calls.Checkpoints(checkpoints, source, revision, trust_remote_code)
    view = verify_view.View(len(checkpoints) > 1, verbose, json)
    if backend == "files":
        results = start.run(calls.FileCheck(of, each=view.show), quiet, verbose)
        verify_view.end(results, json)
        return
    served = calls.Served(python, timeout, server, model)
    proof = calls.EngineCheck(of, served, level, prompts, dtype, jobs, device, view.show_proof)
    verify_view.end_proofs(start.run(proof, quiet, verbose), json)
