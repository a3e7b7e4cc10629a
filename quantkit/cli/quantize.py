"""`quantkit quantize`."""

from pathlib import Path

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
    FitMinQuality,
    FitObjective,
    FitReport,
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
from quantkit.hardware.place import Place
from quantkit.registry import NATIVE


def command(
    model: Model,
    recipe: MaybeRecipes = None,
    fit: Fit = None,
    count: FitCount = 1,
    context: FitContext = None,
    users: FitUsers = None,
    objective: FitObjective = None,
    min_quality: FitMinQuality = None,
    report: FitReport = None,
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
    """Quantise a model.

    Writes DIR/RECIPE/ for every recipe, all from one pass over the model. `torchrun
    --nproc-per-node 8 -m quantkit quantize ...` shares the work among GPUs. --bits, --size and
    --fit GPU --mixed choose formats layer by layer and write DIR/NAME/ with the choice as
    recipe.yaml.
    """
    from quantkit import launch
    from quantkit.calls.data import Data
    from quantkit.calls.quantize import Quantization, Spending
    from quantkit.cli import quantize_view, start

    aim = objective or "latency"
    place = _checked(Place(fit or "", count, context, users, aim, min_quality, report))
    spending = None
    if bits is not None or size is not None or mixed:
        among = tuple(split(formats)) if formats else ()
        if objective or min_quality or report:
            raise typer.BadParameter(
                "--objective, --min-quality and --report choose among recipes, not layer by layer; "
                "leave them out"
            )
        room = place if mixed else None
        spending = Spending(bits, size, room, among, sensitivity, target)
    elif target != "vllm" or formats or sensitivity:
        raise typer.BadParameter("--for, --formats and --sensitivity need --bits or --size")
    elif not recipe and place is None:
        raise typer.BadParameter(
            "name a recipe with -r / --recipe (`quantkit recipes list` has them), a GPU with "
            "--fit, or a budget with --bits or --size"
        )
    elif recipe and place is not None:
        raise typer.BadParameter("--fit chooses the recipe; leave out --recipe")
    with start.sharing(device) as (ranks, where):
        call = Quantization(
            model,
            out,
            tuple(recipe or ()),
            place if spending is None else None,
            spending,
            Data(calibration, samples, length),
            ours_by_default=spending is not None,
            format=format,
            engine=engine,
            tune=tune,
            imatrix=imatrix,
            requantize=requantize,
            offload=offload,
            device=where,
            ranks=ranks,
            revision=revision,
            trust_remote_code=trust_remote_code,
            force=force,
            dry_run=dry_run,
        )
        made = start.run(call, quiet, verbose)
    if launch.is_first():
        quantize_view.show(made, json)


def _checked(place: Place) -> Place | None:
    """The GPUs of --fit; None without it."""
    if place.gpu:
        return place
    if place != Place(""):
        raise typer.BadParameter(
            "--count, --context, --users, --objective, --min-quality and --report need --fit"
        )
    return None
