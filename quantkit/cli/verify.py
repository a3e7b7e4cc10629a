"""`quantkit verify`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.options import AsJson, Device, Quiet, Revision, TrustRemoteCode, Verbose, one_of
from quantkit.errors import CheckpointError, Faulty

if TYPE_CHECKING:
    from quantkit.export.verified import Verified
    from quantkit.model.source import ModelSource
    from quantkit.progress import Progress
    from quantkit.proof.run import Proof
    from quantkit.verification.checkpoint import Verification

BACKENDS = ("files", "vllm")
LEVELS = {
    "config": "config",
    "generate": "text",
    "logprobs": "text and log-probabilities",
}


def command(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Checkpoint folders.")
    ],
    source: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The source, where no manifest here names it."),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="vllm: ask the engine too, once the files are right.",
            callback=one_of(*BACKENDS),
        ),
    ] = "files",
    level: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Of vllm: config (no weights), generate or logprobs.",
            callback=one_of(*LEVELS),
        ),
    ] = "logprobs",
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The Python of vLLM's own environment.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Or a running server of the checkpoint.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the server calls it, where not by its folder."),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompts of level logprobs.")
    ] = 64,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="What vLLM computes in: auto, bfloat16, float16.")
    ] = "auto",
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Engines at a time, on one GPU.")
    ] = 1,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For one engine, from start to end.")
    ] = 600.0,
    predicted_for: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="ENGINE",
            help="Predict what vllm or llama.cpp will do, from config and headers alone.",
            callback=one_of("vllm", "llama.cpp"),
        ),
    ] = None,
    for_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="With --for: the engine's version, such as 0.26."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --for: the GPU, for the kernel of each layer."),
    ] = None,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check that checkpoints are whole and right, also those of other tools.

    Files against their hashes, tensors against the recipe or the config that declares them, weights
    against the source. Exit code 1: something is wrong; 3: it could not be checked. With
    --backend vllm the engine then loads each, generates, and its log-probabilities are compared
    with ours; verified.json beside the checkpoint keeps what was found. --for asks no engine and
    reads no weights: it applies the engine's own rules, in seconds.
    """
    from quantkit.cli import console, early, start

    if predicted_for is not None:
        from quantkit.cli.predicting import predict

        if backend != "files" or server is not None or source is not None:
            raise typer.BadParameter("predicts alone: not with --backend, --server or --source")
        predict(checkpoints, predicted_for, for_version, gpu, json)
        return
    if for_version is not None or gpu is not None:
        raise typer.BadParameter("--for-version and --gpu go with --for")

    if server is not None and (python is not None or len(checkpoints) != 1):
        raise typer.BadParameter("a server serves one checkpoint: give its folder, and no --python")
    if server is not None and level == "config":
        raise typer.BadParameter("a running server is past its config: use --level generate")
    if model is not None and server is None:
        raise typer.BadParameter("goes with --server", param_hint="--model")
    start.stay_offline_if(source is None or Path(source).exists())
    early.folders(checkpoints)
    early.program(python)
    from quantkit.model.source import ModelSource

    original = None
    if source:
        original = ModelSource.open(source, revision, trust_remote_code, requantize=True)
    start.load_lean(quiet)
    with console.progress(quiet, verbose) as progress:
        if backend == "files":
            _files(checkpoints, original, trust_remote_code, json, progress)
            return
        from quantkit.engine.vllm_job import Vllm
        from quantkit.proof.run import Asked, prove
        from quantkit.proof.served import Server

        asked = Asked(level, prompts, device, dtype, jobs, trust_remote_code)
        key = os.environ.get("OPENAI_API_KEY")
        engine = Server(server, model, key) if server else Vllm(python, timeout)
        proofs = []
        for proof in prove(checkpoints, engine, asked, original, progress):
            proofs.append(proof)
            if not json:
                _show(proof, many=len(checkpoints) > 1, verbose=verbose)
    if json:
        told: list[Any] = [proof.to_json() for proof in proofs]
        console.print_json(told[0] if len(told) == 1 else told)
    problems = [found for proof in proofs for found in _problems(proof)]
    _end([line for line, _ in problems], any(is_fault for _, is_fault in problems), json)


def _files(
    folders: list[Path],
    original: "ModelSource | None",
    trust_remote_code: bool,
    as_json: bool,
    progress: "Progress",
) -> None:
    from quantkit.cli import console
    from quantkit.verification.folder import verify

    results = []
    for folder in folders:
        results.append(verify(folder, original, progress, trust_remote_code))
        if not as_json:
            _heading(folder, len(folders) > 1)
            _show_checks(results[-1])
    if as_json:
        told = [result.to_json() for result in results]
        console.print_json(told[0] if len(told) == 1 else told)
    faulty = [result for result in results if not result.ok]
    _end([_faulty(result) for result in faulty], bool(faulty), as_json)


def _heading(folder: Path, many: bool) -> None:
    if many:
        typer.echo(f"{folder}")


def _show_checks(result: "Verification") -> None:
    from quantkit.cli import console

    for check in result.passed:
        console.say(f"ok        {check}", hang=10)
    for words in result.left_out:
        console.say(f"left out  {words}", hang=10)
    for name, error in result.worst[:3]:
        console.say(f"          {name} differs by {error:.4f} from the source")


def _show(proof: "Proof", many: bool, verbose: bool) -> None:
    from quantkit.cli import console
    from quantkit.export.verified import FILE

    _heading(proof.folder, many)
    _show_checks(proof.checks)
    found = proof.verified
    if found is None:
        return
    where = f"{found.version}, {found.device}" + (f", {found.dtype}" if found.dtype else "")
    mark = "ok " if found.ok else "?  " if found.undecided else "off"
    console.say(f"{mark}       vLLM {where}: {LEVELS[found.level]}", hang=10)
    if found.texts:
        typer.echo(f"          {len(found.texts)} texts, such as {_line(found.texts[0])}")
        for text in found.texts[1:] if verbose else []:
            typer.echo(f"          {_line(text)}")
    for what, part in (("prompt", found.read), ("generated", found.written)):
        if part is not None:
            typer.echo(
                f"          {part.n_tokens:,} {what} tokens: off by {part.mean:.4f} nats, "
                f"rounding explains {part.limit_mean:.4f}"
            )
    if found.level == "logprobs":
        console.say(f"          {_attributed(found)}", hang=10)
    typer.echo(f"          written to {proof.folder / FILE}")


def _attributed(found: "Verified") -> str:
    """Whether the engine served the checkpoint or its source, and how sure that is."""
    whose = found.attribution
    if whose is None:
        return (
            "not held against the unquantised source, which is not at hand: give it with --source"
        )
    served = {
        "checkpoint": "the checkpoint is served, not its unquantised source",
        "source": "the unquantised source is served, not the checkpoint",
        None: "cannot tell the checkpoint and its unquantised source apart",
    }[whose.nearer]
    return (
        f"{served}: references {whose.apart:.4f} nats apart, "
        f"power {whose.power:.3f} with {whose.n_tokens:,} positions"
    )


def _line(text: str) -> str:
    """The beginning of a text in one line."""
    short = " ".join(text.split())
    return repr(short if len(short) <= 48 else f"{short[:47]}…")


def _problems(proof: "Proof") -> list[tuple[str, bool]]:
    """What keeps a checkpoint from being called sound, and whether it is a fault of it."""
    if not proof.checks.ok:
        return [(_faulty(proof.checks), True)]
    if proof.problem is not None:
        return [(f"{proof.folder} was not checked in vLLM: {proof.problem}", False)]
    found = proof.verified
    if found is None or found.ok:
        return []
    return [(f"{proof.folder} {found.sentence}", not found.undecided)]


def _faulty(result: "Verification") -> str:
    n = len(result.faults)
    faults = "\n".join(f"  {fault}" for fault in result.faults)
    return f"{result.path} has {n} fault{'s' * (n > 1)}:\n{faults}"


def _end(problems: list[str], is_faulty: bool, as_json: bool) -> None:
    """A last line with the verdict; 1 is the exit code of a fault, 3 of what was not checked."""
    if not as_json:
        verdict = "wrong" if is_faulty else "not checked" if problems else "sound"
        typer.echo(f"verdict: {verdict}")
    if problems:
        raise (Faulty if is_faulty else CheckpointError)("\n".join(problems))
