"""`quantkit recommend`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import AsJson, EmitImage, EmitTo, Force, Lora, TimeToFirst, one_of
from quantkit.errors import EXIT_GATE, AdviceError, HardwareError, UsageError

if TYPE_CHECKING:
    from quantkit.advise.candidates import Question
    from quantkit.advise.recommendation import Recommendation
    from quantkit.hardware.gpus import GPU
    from quantkit.serving.adapters import Adapter
    from quantkit.serving.draft import Draft
    from quantkit.serving.plan import Plan


def command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A folder, a hub id, a config.json, or a size: 70B."),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU, several with commas, `auto` or `all`."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="GPUs that share it; default: 1.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="GPUs to cut every layer over; default: the best."),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="GPUs, or groups of them, with layers in a row."),
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Give out experts whole; of a mixture.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of prompt and answer; default: 8192, or all it takes."
        ),
    ] = None,
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
        str,
        typer.Option(
            metavar="WHAT",
            help="latency, throughput, memory or quality.",
            callback=one_of("latency", "throughput", "memory", "quality"),
        ),
    ] = "latency",
    min_quality: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="SHARE", help="Of the source's accuracy; default: 0.97."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A report.json of this model.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of a GPU that is not listed: 24GB, 23034MiB."),
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
        float | None,
        typer.Option(min=0, metavar="PRICE", help="Of one GPU: adds what tokens cost."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A bench.json: what was measured replaces estimates."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="DRAFT", help="Guess ahead: a model, ngram, or eagle:DIR."),
    ] = None,
    lora: Lora = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Plan for chat, batch or mixed traffic.",
            callback=one_of("chat", "batch", "mixed"),
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Write the plan's files: compose, k8s or grafana.",
            callback=one_of("compose", "k8s", "grafana"),
        ),
    ] = None,
    out: EmitTo = None,
    image: EmitImage = None,
    ttft: TimeToFirst = None,
    force: Force = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything as a page.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Say which format to serve a model in on a GPU, and why; exit 1 where none serves."""
    from quantkit.advise import document, formats, parallel, profiles, quality, shape
    from quantkit.advise.candidates import MIN_QUALITY, Catalogue, Question, check_objective
    from quantkit.advise.recommendation import recommend
    from quantkit.advise.split import Wish
    from quantkit.cli import console, recommend_view, serving_view, start
    from quantkit.model.source import context_of
    from quantkit.serving import adapters, target
    from quantkit.serving import draft as drafts
    from quantkit.serving import plan as plans

    if emit is not None:
        from quantkit.serving import emit as emitting

        emitting.check(emit, out or Path(), force, image)
    elif image is not None:
        raise typer.BadParameter("goes with --emit", param_hint="--image")
    check_objective(objective)
    if profile is not None:
        profiles.find(profile)
    chosen = _gpus(gpu, memory, bandwidth, capability, tflops)
    if gpu_hour is not None and len(chosen) > 1:
        raise typer.BadParameter("--gpu-hour is the price of one GPU; name one with --gpu")
    if len(chosen) > 1 and (bench is not None or emit is not None):
        raise typer.BadParameter("--bench and --emit are for one GPU; name one with --gpu")
    start.stay_offline_if(start.is_local(model))
    of_model = shape.of(model)
    scored = {} if report is None else quality.from_report(report, of_model)
    served = target.planned(of_model, None, model)
    # Like the model itself, a draft need not be at hand: its shape is enough.
    guesses = drafts.parse(
        draft, served, opened=lambda text: target.planned(shape.of(text), None, text)
    )
    loras = adapters.parse(lora or [], is_gguf=False)

    question = Question(
        Catalogue(of_model, formats.considered(scored, parallel.n_experts(of_model) > 0)),
        context=min(8192, context_of(of_model.config)) if context is None else context,
        users=users,
        answer=answer,
        # Who says how GPUs share it has said how many there are.
        count=count or (tensor_parallel or 1) * (pipeline_parallel or 1),
        wish=Wish(tensor_parallel, pipeline_parallel, expert_parallel),
        objective=objective,
        min_quality=MIN_QUALITY if min_quality is None else min_quality,
        gpu_hour=gpu_hour,
        qualities=scored,
        beside=lambda split: plans.beside(of_model, guesses, loras, split),
        profile=profile,
    )
    if bench is not None:
        question = _measured(question, bench, chosen[0])
    found = [recommend(question, one, in_depth=len(chosen) == 1) for one in chosen]
    plan = _plan(found[0], model, guesses, loras) if len(found) == 1 else None
    if html is not None:
        from quantkit.advise import page
        from quantkit.storage import write_text

        write_text(html, page.render(found))
    if json:
        told = document.to_json(found)
        console.print_json(told if plan is None else {**told, "serving": plan.to_json()})
    elif len(found) == 1:
        recommend_view.show(found[0], model, _sets(report))
        if plan is not None:
            typer.echo("\nServe it")
            serving_view.show(plan)
    elif html is None:  # which has it all, and more
        recommend_view.show_many(found)
    if html is not None:
        typer.echo(f"written: {html}", err=True)
    if emit is not None:
        if plan is None:
            raise AdviceError("nothing serves it, so there is no plan to write")
        serving_view.write_files(
            serving_view.made_files(
                _placed(plan), emit, out, ttft or _slow_first_token(found[0]), force, image
            )
        )
    if not any(one.chosen for one in found):
        raise typer.Exit(EXIT_GATE)  # so that a script can tell


def _slow_first_token(found: "Recommendation") -> float:
    """Seconds that are worth an alert: more than the slow end of what was estimated."""
    speed = found.chosen.speed if found.chosen else None
    slow = speed.first_token.high if speed and speed.first_token else 0.0
    return max(1.0, round(1.2 * slow, 1))


def _placed(plan: "Plan") -> "Plan":
    """The plan with the whole path of a checkpoint that is yet to be made: files for it may lie
    elsewhere."""
    if plan.target.recipe is None:
        return plan
    path = str(Path(plan.target.path).absolute())
    return replace(plan, target=replace(plan.target, path=path))


def _sets(report: Path | None) -> dict[str, str]:
    """The calibration sets that a report's candidates learned from, by recipe."""
    if report is None:
        return {}
    from quantkit.report.document import read

    found = read(report / "report.json" if report.is_dir() else report)
    return {
        entry.recipe: entry.made.calibration
        for entry in found.candidates
        if entry.recipe and entry.made and entry.made.calibration
    }


def _measured(question: "Question", bench: Path, gpu: "GPU") -> "Question":
    """The question with what was measured under its own load; refused where nothing was."""
    from quantkit.advise import measured
    from quantkit.bench import measured as measurements

    found = measurements.measured(bench)
    known = measured.speeds(found, question, gpu)
    if not known.speeds:
        load = question.load(question.users or 1)
        raise AdviceError(
            f"{bench} has nothing that was measured on {question.count} x {gpu.name} with "
            f"{load.users} at a time, prompts near {load.prompt:,} and answers near "
            f"{load.answer:,} tokens; measure that, or ask for what was measured"
        )
    return question.but(measured=known)


def _plan(
    found: "Recommendation",
    model: str,
    draft: "Draft | None",
    loras: "tuple[Adapter, ...]",
) -> "Plan | None":
    """How to serve the answer."""
    from quantkit.serving import plan, target

    chosen, question = found.chosen, found.question
    if chosen is None:
        return None
    recipe = chosen.format.recipe
    folder = model if recipe is None else f"out/{recipe.name}"
    demand = plan.Demand(
        gpu=found.gpu,
        count=chosen.count,
        split=chosen.split,
        context=question.context,
        users=question.users,
        profile=question.traffic.name,
        kv_bits=chosen.format.kv_bits,
        utilisation=question.utilisation,
        draft=draft,
        adapters=loras,
    )
    return plan.make(target.planned(question.catalogue.shape, recipe, folder), demand, chosen.size)


def _gpus(
    names: str | None,
    memory: str | None,
    bandwidth: str | None,
    capability: str | None,
    tflops: float | None,
) -> "list[GPU]":
    """The GPUs that were named, or the one that was described."""
    from quantkit.hardware import gpus

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
        try:
            return [gpus.describe(memory, bandwidth, capability, fp16_tflops=tflops)]
        except HardwareError as error:  # they are the options' own values
            raise UsageError(str(error)) from error
    if names == "all":
        return list(gpus.load())
    found = [gpus.find(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise typer.BadParameter("--gpu names none")
    for name in (name.strip() for name in names.split(",")):
        if name not in ("", "auto") and (others := gpus.siblings(name)):
            taken = gpus.find(name).name
            typer.echo(f"{name} is taken as {taken}; there is also {', '.join(others)}", err=True)
    return list({gpu.name: gpu for gpu in found}.values())
