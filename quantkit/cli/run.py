"""`quantkit run`."""

from pathlib import Path

from quantkit.cli.options import (
    AsJson,
    Calibration,
    Device,
    Engine,
    Force,
    Length,
    Limit,
    MaxLength,
    Model,
    Offload,
    Out,
    Quiet,
    Recipes,
    Requantize,
    Revision,
    Samples,
    Tasks,
    TrustRemoteCode,
    Verbose,
    split,
)
from quantkit.registry import NATIVE


def command(
    model: Model,
    recipe: Recipes,
    out: Out = Path("out"),
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    requantize: Requantize = False,
    tasks: Tasks = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    engine: Engine = NATIVE,
    device: Device = "auto",
    offload: Offload = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Quantise, verify, score and report in one go.

    Resumes an unfinished run in the same folder.
    """
    from quantkit.calls.data import Data
    from quantkit.calls.run import Line
    from quantkit.calls.score import ScoreOptions
    from quantkit.cli import console, start

    names = tuple(split(tasks)) if tasks is not None else None
    call = Line(
        model,
        recipe,
        out,
        Data(calibration, samples, length),
        ScoreOptions.of(names, [model], limit=limit, max_length=max_length),
        engine,
        offload,
        device,
        revision,
        trust_remote_code,
        force,
        requantize,
    )
    with start.report_kept(out):
        outcome = start.run(call, quiet, verbose)
    start.show(outcome, json)
    if not (json or quiet):
        console.say(
            f"written to {out}: checkpoints, scores, report.json, report.md, report.html", err=True
        )
