"""`quantkit sensitivity`."""

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.cli.options import (
    AsJson,
    Calibration,
    Device,
    For,
    Force,
    Formats,
    Length,
    Model,
    Offload,
    Out,
    Quiet,
    Requantize,
    Revision,
    Samples,
    TrustRemoteCode,
    Verbose,
    split,
)

if TYPE_CHECKING:
    from quantkit.mixed.table import Table


def command(
    model: Model,
    calibration: Calibration = None,
    out: Out = Path("sensitivity"),
    target: For = "vllm",
    formats: Formats = None,
    samples: Samples = None,
    length: Length = None,
    requantize: Requantize = False,
    device: Device = "auto",
    offload: Offload = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure what each layer costs in each format.

    Writes DIR/sensitivity.json and an HTML page. `quantize --bits N --sensitivity DIR` then
    chooses formats without another pass.
    """
    from quantkit.calls.data import Data
    from quantkit.calls.run import Measuring
    from quantkit.cli import mixed_view, start

    call = Measuring(
        model,
        out,
        Data(calibration, samples, length),
        tuple(split(formats)) if formats else (),
        target,
        requantize,
        offload,
        device,
        revision,
        trust_remote_code,
        force,
    )
    table = start.run(call, quiet, verbose)
    _show(table, model, out, json)
    if not json:
        mixed_view.show_curve(table)


def _show(table: "Table", model: str, out: Path, as_json: bool) -> None:
    from quantkit.cli import console

    if as_json:
        console.print_json(table.to_json())
        return
    measured = (
        f"{len(table.units)} units (layers that share a format) in {len(table.formats)} formats"
    )
    console.say(f"measured {measured}; see {out}/sensitivity.html")
    command = f"`quantkit quantize {model} --bits N --sensitivity {out}`"
    console.say(f"{command} chooses formats by this table")
