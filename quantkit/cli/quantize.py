"""`quantkit quantize`."""

from pathlib import Path

from quantkit.cli.options import (
    AsJson,
    Calibration,
    Device,
    Force,
    Length,
    Model,
    Out,
    Quiet,
    Recipes,
    Revision,
    Samples,
    TrustRemoteCode,
    Verbose,
)


def command(
    model: Model,
    recipe: Recipes,
    out: Out = Path("out"),
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make quantised checkpoints of a model.

    Writes DIR/RECIPE/ for every recipe, all from one read of the model.
    """
    from quantkit.cli import console, start

    source, loaded = start.model_and_recipes(model, recipe, revision, trust_remote_code)

    from quantkit.quantize.run import CalibrationChoice, quantize

    chosen = CalibrationChoice(calibration, samples, length) if calibration else None

    with console.progress(quiet, verbose) as progress:
        checkpoints = quantize(source, loaded, out, device, force, progress, chosen)
    if json:
        console.print_json(
            [{"path": str(c.folder), "manifest": c.manifest.to_json()} for c in checkpoints]
        )
        return
    from quantkit.storage import gib

    console.print_table(
        ["checkpoint", "size", "bits/weight", "worst layer's error", "seconds"],
        [
            [
                str(c.folder),
                gib(c.manifest.size_bytes),
                f"{c.manifest.bits_per_weight:.2f}",
                f"{max(layer.relative_error for layer in c.manifest.layers.values()):.4f}",
                f"{c.manifest.seconds:.1f}",
            ]
            for c in checkpoints
        ],
    )
