"""`quantkit quantize`."""

from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.cli.options import (
    AsJson,
    Calibration,
    Device,
    DryRun,
    Engine,
    Force,
    Imatrix,
    Length,
    Model,
    Offload,
    Out,
    Quiet,
    Recipes,
    Revision,
    Samples,
    TrustRemoteCode,
    Verbose,
)
from quantkit.registry import NATIVE

if TYPE_CHECKING:
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.quantize.prepare import Job


def command(
    model: Model,
    recipe: Recipes,
    out: Out = Path("out"),
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    imatrix: Imatrix = None,
    engine: Engine = NATIVE,
    device: Device = "auto",
    offload: Offload = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    force: Force = False,
    dry_run: DryRun = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make quantised checkpoints of a model.

    Writes DIR/RECIPE/ for every recipe, all from one read of the model.
    """
    from quantkit.cli import console, start

    source, loaded = start.model_and_recipes(model, recipe, revision, trust_remote_code, engine)

    from quantkit.quantize.prepare import CalibrationChoice, prepare
    from quantkit.quantize.run import quantize

    chosen = CalibrationChoice(calibration, samples, length) if calibration else None

    if dry_run:
        with console.progress(quiet, verbose) as progress:
            job = prepare(
                source,
                loaded,
                out,
                device,
                force,
                progress,
                chosen,
                offload=offload,
                engine=engine,
                imatrix=imatrix,
            )
        _show_plan(job, json)
        return
    with console.progress(quiet, verbose) as progress:
        checkpoints = quantize(
            source,
            loaded,
            out,
            device,
            force,
            progress,
            chosen,
            offload=offload,
            engine=engine,
            imatrix=imatrix,
        )
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
                _worst(c),
                f"{c.manifest.seconds:.1f}",
            ]
            for c in checkpoints
        ],
    )
    _show_worst(checkpoints)


def _worst(checkpoint: "Checkpoint") -> str:
    errors = [layer.relative_error for layer in checkpoint.manifest.layers.values()]
    return f"{max(errors):.4f}" if errors else ""  # some GGUF files hold plain numbers only


def _show_worst(checkpoints: "list[Checkpoint]") -> None:
    """The ten layers that lose most of their output, over all calibrated recipes."""
    from quantkit.cli import console

    layers = [
        (layer.output_error, c.label, name, layer)
        for c in checkpoints
        for name, layer in c.manifest.layers.items()
        if layer.output_error is not None
    ]
    if not layers:
        return
    layers.sort(key=lambda item: item[:3], reverse=True)
    console.print_table(
        ["worst layers", "recipe", "output error", "damping", ""],
        [
            [
                name,
                recipe,
                f"{error:.2e}",
                "" if layer.damping is None else f"{layer.damping:g}",
                "rounded to nearest" if layer.fallback else "",
            ]
            for error, recipe, name, layer in layers[:10]
        ],
        words=(0, 1, 4),
    )


def _show_plan(job: "Job", as_json: bool) -> None:
    from quantkit.cli import console
    from quantkit.storage import gib

    if as_json:
        console.print_json(job.to_json())
        return
    console.print_table(
        ["would write", "layers", "size", "of source", "bits/weight", "learns from data"],
        [
            [
                str(target),
                str(len(plan.quantized)),
                gib(plan.size_bytes),
                f"{plan.size_bytes / job.source_record.size_bytes:.1%}",
                f"{plan.bits_per_weight:.2f}",
                "yes" if job.learns(plan) else "no",
            ]
            for target, plan in job.everything
        ],
    )
