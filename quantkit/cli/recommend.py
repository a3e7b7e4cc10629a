"""`quantkit recommend`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import AsJson

if TYPE_CHECKING:
    from quantkit.advise.gpus import GPU


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder, a hub id, a config.json, or a size: 70B."),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU, several with commas, `auto` or `all`."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs that share it.")] = 1,
    context: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of a prompt with its answer.")
    ] = 8192,
    answer: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of the answer; default: a quarter."),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="At a time; default: 1; for throughput, all that fit."
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="WHAT", help="latency, throughput, memory or quality.")
    ] = "latency",
    min_quality: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Of the source's accuracy; default: 0.97."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report.json of this model.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a GPU that is not listed: 24GB.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of that GPU: 1008GB/s.")
    ] = None,
    capability: Annotated[
        str | None, typer.Option(metavar="X.Y", help="Of that GPU: 8.9, or gfx942 of AMD's.")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(metavar="N", help="Of that GPU, dense, in 16 bits.")
    ] = None,
    gpu_hour: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Of one GPU: adds what tokens cost.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything as a page.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Say which format to serve a model in on a GPU, and why."""
    from quantkit.advise import document, formats, quality, shape
    from quantkit.advise.candidates import MIN_QUALITY, Catalogue, Question
    from quantkit.advise.recommendation import recommend
    from quantkit.cli import console, recommend_view, start

    chosen = _gpus(gpu, memory, bandwidth, capability, tflops)
    if gpu_hour is not None and len(chosen) > 1:
        raise typer.BadParameter("--gpu-hour is the price of one GPU; name one with --gpu")
    start.stay_offline_if(start.is_local(model))
    of_model = shape.of(model)
    scored = {} if report is None else quality.from_report(report, of_model)
    question = Question(
        Catalogue(of_model, formats.considered(scored)),
        context=context,
        users=users,
        answer=answer,
        count=count,
        objective=objective,
        min_quality=MIN_QUALITY if min_quality is None else min_quality,
        gpu_hour=gpu_hour,
        qualities=scored,
    )
    found = [recommend(question, one, in_depth=len(chosen) == 1) for one in chosen]
    if html is not None:
        from quantkit.advise import page
        from quantkit.storage import write_text

        write_text(html, page.render(found))
    if json:
        console.print_json(document.to_json(found))
    elif len(found) == 1:
        recommend_view.show(found[0], model)
    else:
        recommend_view.show_many(found)


def _gpus(
    names: str | None,
    memory: str | None,
    bandwidth: str | None,
    capability: str | None,
    tflops: float | None,
) -> "list[GPU]":
    """The GPUs that were named, or the one that was described."""
    from quantkit.advise import gpus

    described = [o for o in (memory, bandwidth, capability, tflops) if o is not None]
    if names is not None and described:
        raise typer.BadParameter(
            "--gpu names a GPU; --memory, --bandwidth, --capability and --tflops describe one that "
            "is not listed: give either"
        )
    if names is None:
        if memory is None or bandwidth is None:
            raise typer.BadParameter(
                "which GPU? Name one with --gpu (`quantkit gpus` lists them), or give --memory and "
                "--bandwidth of any other"
            )
        return [gpus.describe(memory, bandwidth, capability, fp16_tflops=tflops)]
    if names == "all":
        return list(gpus.load())
    found = [gpus.find(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter("--gpu names none")
    return list({gpu.name: gpu for gpu in found}.values())
