"""`quantkit convert`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson, Force, Quiet, TrustRemoteCode, Verbose, one_of
from quantkit.formats import FORMATS


def command(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint folder.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="compressed-tensors, gptq, awq or fp8; modelopt or gguf for NVFP4.",
            callback=one_of(*FORMATS, "gguf"),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="The new folder; default: beside the old one."
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a checkpoint in another format, if that loses nothing.

    The numbers stay what they are; where the other format cannot hold them, it says why.
    """
    from quantkit.cli import console, early, start
    from quantkit.export.manifest import Manifest

    start.stay_offline_if(True)
    Manifest.read(checkpoint)
    if out is not None:
        early.new_folder(out, force)
    start.load_lean()
    from quantkit.conversion import convert
    from quantkit.storage import gib

    with console.progress(quiet, verbose) as progress:
        made = convert(checkpoint, to, out, force, progress, trust_remote_code)
    record = made.manifest
    if json:
        console.print_json({"path": str(made.folder), "manifest": record.to_json()})
        return
    console.print_table(
        ["checkpoint", "name", "format", "size", "bits/weight", "seconds"],
        [
            [
                str(made.folder),
                record.name,
                record.format,
                gib(record.size_bytes),
                f"{record.bits_per_weight:.2f}",
                f"{record.seconds:.1f}",
            ]
        ],
        words=(0, 1, 2),
    )
