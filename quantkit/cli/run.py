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
    """Quantize, verify, score and report in one go.

    What an earlier run in the same folder finished is taken up, not made again.
    """
    from quantkit.cli import console, early, start
    from quantkit.onepass import asked as asking
    from quantkit.scoring.suites import by_default

    names = split(tasks) if tasks is not None else list(by_default([model]))
    at_home = all(start.is_own(t) for t in names) and not start.set_needs_hub(calibration)
    start.stay_offline_if(start.is_local(model) and at_home)
    loaded = start.recipes(recipe, engine)
    asking.refuse_twice(loaded)
    asking.check_learning(loaded, calibration is not None, None, engine)
    early.calibration(calibration)
    early.output(out)
    start.refuse_strangers([out / one.name for one in loaded], force)
    source = start.source(model, revision, trust_remote_code, calibration)
    early.tasks(names if tasks is not None else [])
    asking.require_least_space(source, loaded, out)
    if engine == NATIVE:
        start.load_lean(quiet)

    from quantkit import pipeline
    from quantkit.onepass.prepare import Run
    from quantkit.scoring.harness import Asked

    chosen = start.calibration_choice(calibration, samples, length)

    with start.telling_what_is_kept(out), console.progress(quiet, verbose) as progress:
        asked = Asked(tuple(names), limit, max_length=max_length)
        how = Run(progress, force, offload, engine)
        outcome = pipeline.run(source, loaded, asked, out, device, chosen, how)
    start.show(outcome, json)
    if not (json or quiet):
        console.say(
            f"written: {out}: checkpoints, scores, report.json, report.md, report.html", err=True
        )
