"""`quantkit convert`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import AsJson, Force, Quiet, TrustRemoteCode, Verbose, one_of
from quantkit.formats import FORMATS, PLAIN

if TYPE_CHECKING:
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.repair import Repaired
    from quantkit.to_plain import Plain

REPAIR_ONLY = "mxfp4"
"""gpt-oss's own format, which can be repaired but not written."""


def command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint folder, or a GGUF file.")
    ],
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="compressed-tensors, gptq, awq or fp8; modelopt or gguf for NVFP4; "
            "bf16, f16 or f32 dequantises.",
            callback=one_of(*FORMATS, "gguf", REPAIR_ONLY, *PLAIN),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="Output folder; default: next to the input."
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Repair a checkpoint from another tool; --to names its own format."
        ),
    ] = False,
    allow_rounding: Annotated[
        bool,
        typer.Option("--allow-rounding", help="With --repair: round scales that do not fit."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a checkpoint in another format, losslessly.

    The values stay the same; if the other format cannot hold them, quantkit explains why. --to
    bf16, f16 or f32 dequantises a GGUF file or a quantised folder into a plain Hugging Face folder.
    --repair fixes mechanical faults in a copy: names in `ignore`, unknown and missing keys, padded
    integers, missing weight_shape, stray tensors, differing global scales of fused layers, and
    experts fused into one tensor (or, for gpt-oss in MXFP4, stored one by one). repaired.json lists
    every change.
    """
    from quantkit.calls.convert import Conversion, Dequantization, Repair
    from quantkit.cli import start

    if allow_rounding and not repair:
        raise typer.BadParameter("needs --repair", param_hint="--allow-rounding")
    if to == REPAIR_ONLY and not repair:
        raise typer.BadParameter("mxfp4 needs --repair", param_hint="--to")
    if to in PLAIN and repair:
        raise typer.BadParameter("--repair keeps the format", param_hint="--to")
    if repair:
        mending = Repair(checkpoint, to, out, allow_rounding, force)
        _show_repaired(start.run(mending, quiet, verbose), json)
        return
    if to in PLAIN:
        plain = Dequantization(checkpoint, to, out, trust_remote_code, force)
        _show_plain(start.run(plain, quiet, verbose), json)
        return
    call = Conversion(checkpoint, to, out, trust_remote_code, force)
    _show(start.run(call, quiet, verbose), json)


def _show_repaired(mended: "Repaired", as_json: bool) -> None:
    from quantkit.cli import console

    if as_json:
        console.print_json({"path": str(mended.folder), **mended.to_json()})
        return
    for change in mended.changes:
        error = "" if change.error is None else f" (error {change.error:.2e})"
        console.say(f"{change.where}: {change.what}{error}", hang=2)
    typer.echo(f"written to {mended.folder}")


def _show_plain(made: "Plain", as_json: bool) -> None:
    from quantkit.cli import console
    from quantkit.storage import gib

    if as_json:
        console.print_json({"path": str(made.folder), **made.to_json()})
        return
    console.say(f"from {made.quantized_by}: {made.n_tensors} tensors, {gib(made.size_bytes)}")
    typer.echo(f"written to {made.folder}")


def _show(made: "Checkpoint", as_json: bool) -> None:
    from quantkit.cli import console
    from quantkit.storage import gib

    record = made.manifest
    if as_json:
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
