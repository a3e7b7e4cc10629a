"""`quantkit quantize`."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quantkit.cli.options import (
    AsJson,
    Bits,
    Calibration,
    Device,
    DryRun,
    Engine,
    Fit,
    FitContext,
    FitCount,
    FitUsers,
    For,
    Force,
    Format,
    Formats,
    Imatrix,
    Length,
    MaybeRecipes,
    Mixed,
    Model,
    Offload,
    Out,
    Quiet,
    Requantize,
    Revision,
    Samples,
    Sensitivity,
    Size,
    TrustRemoteCode,
    Tune,
    Verbose,
    split,
)
from quantkit.errors import UsageError
from quantkit.registry import NATIVE

if TYPE_CHECKING:
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.onepass.prepare import Job


def command(
    model: Model,
    recipe: MaybeRecipes = None,
    fit: Fit = None,
    count: FitCount = 1,
    context: FitContext = None,
    users: FitUsers = 1,
    bits: Bits = None,
    size: Size = None,
    mixed: Mixed = False,
    target: For = "vllm",
    formats: Formats = None,
    sensitivity: Sensitivity = None,
    out: Out = Path("out"),
    format: Format = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    imatrix: Imatrix = None,
    requantize: Requantize = False,
    tune: Tune = False,
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

    Writes DIR/RECIPE/ for every recipe, all from one read of the model. Started by torchrun,
    as `torchrun --nproc-per-node 8 -m quantkit quantize ...`, all GPUs share the work. With
    --bits, --size or --fit GPU --mixed, formats are chosen layer by layer, and DIR/NAME/ is
    written with the choice as recipe.yaml.
    """
    from quantkit import launch
    from quantkit.cli import console, early, start
    from quantkit.onepass import asked as asking

    if bits is not None or size is not None or mixed:
        from quantkit.cli import mixed as budgets

        if tune:
            raise typer.BadParameter("--tune goes with --recipe; leave it out, or name a recipe")
        asked = budgets.Asked(
            model,
            budgets.checked(recipe or [], bits, size, fit if mixed else None, engine, format),
            budgets.Place(fit, count, context, users),
            target,
            tuple(split(formats)) if formats else (),
            sensitivity,
        )
        with start.sharing(device) as (ranks, where):
            early.calibration(calibration)
            early.output(out)
            source = start.source(model, revision, trust_remote_code, calibration, requantize)
            start.load_lean(quiet)
            from quantkit.onepass.prepare import Run
            from quantkit.onepass.ranks import Ranks

            with console.progress(quiet or not launch.is_first(), verbose) as progress:
                how = Run(progress, force, offload, imatrix=imatrix, ranks=ranks or Ranks())
                named = budgets.calibration(model, calibration, quiet)
                chosen = start.calibration_choice(named, samples, length)
                bought = budgets.make(asked, source, out, where, chosen, how, dry_run)
        if launch.is_first():
            budgets.show(bought, json)
            if bought.checkpoints and not json:
                _show_made(bought.checkpoints, json)
        return
    if target != "vllm" or formats or sensitivity:
        raise typer.BadParameter("--for, --formats and --sensitivity go with --bits or --size")
    recipes = _recipes(model, recipe or [], fit, count, context, users, quiet)
    if fit is not None:
        from quantkit.cli.fit import calibration as default_set

        calibration = default_set(model, recipes, calibration, quiet)
    from_file = model.lower().endswith(".gguf") and Path(model).is_file()
    with start.sharing(device) as (ranks, where):
        if from_file:
            if calibration:
                raise UsageError(
                    "a GGUF file cannot be calibrated here; give --imatrix, a matrix made before"
                )
            if dry_run or format or tune or engine != NATIVE:
                option = "--dry-run" if dry_run else "--format" if format else "--engine"
                option = "--tune" if tune else option
                raise UsageError(f"{option} does not go with a GGUF file as MODEL; leave it out")
            if not launch.is_first():
                return
            start.stay_offline_if(True)
            from quantkit.onepass.from_gguf import quantize_file
            from quantkit.onepass.prepare import Run
            from quantkit.recipe import load

            made = [load(name) for name in recipes]
            with console.progress(quiet, verbose) as progress:
                how = Run(progress, force, imatrix=imatrix)
                checkpoints = quantize_file(Path(model), made, out, where, how, requantize)
            _show_made(checkpoints, json)
            return
        loaded = start.recipes(recipes, engine, format, tune)
        asking.check(loaded, out, calibration is not None, imatrix, engine, force)
        early.calibration(calibration)
        source = start.source(model, revision, trust_remote_code, calibration, requantize)
        asking.require_least_space(source, loaded, out)
        if engine == NATIVE:
            start.load_lean(quiet)
        from quantkit.onepass.prepare import Run, prepare
        from quantkit.onepass.ranks import Ranks
        from quantkit.onepass.run import quantize

        chosen = start.calibration_choice(calibration, samples, length)
        if dry_run and not launch.is_first():
            return
        with console.progress(quiet or not launch.is_first(), verbose) as progress:
            how = Run(progress, force, offload, engine, imatrix, ranks or Ranks())
            if dry_run:
                job = prepare(source, loaded, out, where, chosen, how)
            else:
                checkpoints = quantize(source, loaded, out, where, chosen, how)
    if dry_run:
        _show_plan(job, json)
    elif launch.is_first():
        _show_made(checkpoints, json)


def _recipes(
    model: str,
    named: list[str],
    gpu: str | None,
    count: int,
    context: int | None,
    users: int,
    quiet: bool,
) -> list[str]:
    """Those that were named, or what fits a GPU."""
    if gpu is None:
        if not named:
            raise typer.BadParameter("name a recipe with -r / --recipe, or a GPU with --fit")
        if (count, context, users) != (1, None, 1):
            raise typer.BadParameter("--count, --context and --users go with --fit")
        return named
    if named:
        raise typer.BadParameter("--fit chooses the recipe; leave out --recipe")
    if model.lower().endswith(".gguf") and Path(model).is_file():
        raise typer.BadParameter("--fit does not go with a GGUF file as MODEL; name a recipe")
    from quantkit.cli import fit

    return fit.recipes(model, gpu, count, context, users, quiet)


def _show_made(checkpoints: "list[Checkpoint]", as_json: bool) -> None:
    from quantkit.cli import console

    if as_json:
        console.print_json(
            [{"path": str(c.folder), "manifest": c.manifest.to_json()} for c in checkpoints]
        )
        return
    from quantkit.storage import gib

    console.print_table(
        ["checkpoint", "size", "bits/weight", "worst weight error", "seconds"],
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
