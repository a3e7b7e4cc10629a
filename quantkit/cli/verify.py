"""`quantkit verify`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson, Quiet, Revision, TrustRemoteCode, Verbose
from quantkit.errors import CheckpointError


def command(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint folder.")],
    source: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The source, where the manifest's name is not enough."),
    ] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check that a checkpoint is whole and right.

    Files against their hashes, tensors against the recipe, weights against the source.
    """
    from quantkit.cli import console, start

    start.stay_offline_if(source is None or Path(source).exists())
    from quantkit.model.source import ModelSource
    from quantkit.verify.checkpoint import verify

    original = ModelSource.open(source, revision, trust_remote_code) if source else None
    with console.progress(quiet, verbose) as progress:
        result = verify(checkpoint, original, progress, trust_remote_code)
    if json:
        console.print_json(result.to_json())
    else:
        for check in result.passed:
            typer.echo(f"ok        {check}")
        for words in result.left_out:
            typer.echo(f"left out  {words}")
        for name, error in result.worst[:3]:
            typer.echo(f"          {name} differs by {error:.4f} from the source")
    if not result.ok:
        n = len(result.faults)
        faults = "\n".join(f"  {fault}" for fault in result.faults)
        raise CheckpointError(f"{checkpoint} has {n} fault{'s' * (n > 1)}:\n{faults}")
