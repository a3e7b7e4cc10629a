"""`quantkit push`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import AsJson, Quiet, TrustRemoteCode, Verbose

if TYPE_CHECKING:
    from quantkit.calls.push import Pushed


def command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint folder made by quantkit.")
    ],
    repo: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="The hub repository; created if missing.")
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Create the repository public instead of private.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Upload to this branch; default: main.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Verify a checkpoint, then upload it to the Hugging Face hub.

    The repository is private unless --public is given; one that exists keeps its visibility. After
    an interruption the same command resumes. Log in first with `hf auth login`.
    """
    from quantkit.calls.push import Push
    from quantkit.cli import start

    call = Push(checkpoint, repo, public, revision, trust_remote_code)
    _show(start.run(call, quiet, verbose), json)


def _show(pushed: "Pushed", as_json: bool) -> None:
    from quantkit.cli import console
    from quantkit.storage import gib

    if as_json:
        console.print_json(pushed.to_json())
        return
    kind = "private" if pushed.is_private else "public"
    typer.echo(f"{pushed.n_files} files, {gib(pushed.size_bytes)}, {kind}: {pushed.url}")
