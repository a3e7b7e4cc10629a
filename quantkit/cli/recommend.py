"""`quantkit recommend`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import (
    AsJson,
    DraftSampling,
    DraftText,
    DraftTokens,
    EmitImage,
    EmitTo,
    Force,
    HostBandwidth,
    HostMemory,
    Lora,
    MaxCpuLoras,
    MaxLoras,
    Replicas,
    one_of,
    tokens,
)
from quantkit.errors import EXIT_GATE, AdviceError, HardwareError, UsageError

if TYPE_CHECKING:
    from quantkit.advise.mixed import Advice
    from quantkit.advise.offload import Host
    from quantkit.hardware.gpus import GPU
    from quantkit.hardware.prices import Prices
    from quantkit.serving.fleet import Fleet
    from quantkit.serving.questions import Answers, Asked


def command(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Folders, hub ids, config.json files, or sizes such as 70B; several: compared.",
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU, several with commas, `cpu`, `auto` or `all`."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="GPUs that share it; default: 1.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tensor-parallel size; default: the best."),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Pipeline-parallel size; default: the best."),
    ] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Keep experts whole; for MoE models.")
    ] = False,
    context: Annotated[
        int | None,
        typer.Option(
            parser=tokens,
            metavar="N",
            help="Tokens of prompt and answer, such as 16k; default: 8192, or all it takes.",
        ),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option(parser=tokens, metavar="N", help="Tokens of the answer; default: a quarter."),
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(parser=tokens, metavar="N", help="Tokens that all prompts begin with."),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="At a time; default: 1; for throughput, all that fit."
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            help="latency (default), throughput, memory or quality.",
            callback=one_of("latency", "throughput", "memory", "quality"),
        ),
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Require first tokens within, such as 1s."),
    ] = None,
    tpot: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Require each further token within, such as 50ms."),
    ] = None,
    min_quality: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="SHARE", help="Of the source's accuracy; default: 0.97."
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A report.json of the model; one for each of several."),
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
    host_memory: HostMemory = None,
    host_bandwidth: HostBandwidth = None,
    gpu_hour: Annotated[
        float | None,
        typer.Option(min=0, metavar="PRICE", help="Of one GPU: adds what tokens cost."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prices of GPUs an hour with their date, as YAML."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A bench.json: what was measured replaces estimates."),
    ] = None,
    draft: DraftText = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Of the draft: a share such as 0.7, or `quantkit draft` JSON."
        ),
    ] = None,
    draft_tokens: DraftTokens = None,
    draft_sampling: DraftSampling = None,
    lora: Lora = None,
    max_loras: MaxLoras = None,
    max_cpu_loras: MaxCpuLoras = None,
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
    replicas: Replicas = None,
    force: Force = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything as a page.")
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A table of `quantkit sensitivity`: what mixed formats make of the room.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Say which format to serve a model in on a GPU, and why; exit 1 where none serves."""
    from quantkit.advise.candidates import Limits
    from quantkit.advise.split import Wish
    from quantkit.calls import hub
    from quantkit.cli import start
    from quantkit.engine.durations import seconds
    from quantkit.serving import adapters, questions
    from quantkit.serving.fleet import Fleet
    from quantkit.serving.fleet import replicas as parsed

    limits = Limits(seconds(ttft, "--ttft"), seconds(tpot, "--tpot"))
    least, most = parsed(replicas)
    fleet = Fleet(least, most, image=image, is_scaled=replicas is not None)
    output = Output(emit, out or Path(), fleet, force, html, json, sensitivity)
    output.check()
    described = Described(memory, bandwidth, capability, tflops)
    chosen = described.gpus(gpu)
    if gpu_hour is not None and len(chosen) > 1:
        raise typer.BadParameter("--gpu-hour is the price of one GPU; name one with --gpu")
    if gpu_hour is not None and prices is not None:
        raise typer.BadParameter("--gpu-hour and --prices both name a price; give one")
    if (len(chosen) > 1 or len(models) > 1) and (bench is not None or emit is not None):
        raise typer.BadParameter("--bench and --emit are for one model on one GPU")
    if (len(chosen) > 1 or len(models) > 1) and sensitivity is not None:
        raise typer.BadParameter("--sensitivity is for one model on one GPU")
    if draft is None and (acceptance or draft_tokens or draft_sampling):
        raise typer.BadParameter("goes with --draft", param_hint="--acceptance")
    start.stay_offline_if(all(map(hub.is_local, models)))
    drafting = (
        questions.Drafting(draft, acceptance, draft_tokens, draft_sampling) if draft else None
    )
    asked = questions.Asked(
        models=tuple(models),
        gpus=tuple(chosen),
        count=count,
        wish=Wish(tensor_parallel, pipeline_parallel, expert_parallel),
        context=context,
        answer=answer,
        users=users,
        objective=objective,
        min_quality=min_quality,
        reports=tuple(report or ()),
        gpu_hour=gpu_hour,
        prices=_prices(prices),
        bench=bench,
        drafting=drafting,
        adapters=adapters.parse(lora or [], is_gguf=False, slots=max_loras, on_host=max_cpu_loras),
        profile=profile,
        limits=limits,
        shared_prefix=shared_prefix or 0,
        host=_host(host_memory, host_bandwidth, chosen[0]),
    )
    answers = questions.answer(asked)
    output.write(answers, asked)
    if not any(one.chosen for one in answers.found):
        raise typer.Exit(EXIT_GATE)  # so that a script can tell


def _mixed(table: Path, asked: "Asked") -> "Advice":
    """What mixed formats make of the GPU's room."""
    from quantkit.advise.mixed import advice

    (model,), (gpu,) = asked.models, asked.gpus
    return advice(model, table, gpu.name, asked.count or 1, asked.context, asked.users or 1)


@dataclass(frozen=True)
class Output:
    """What becomes of the answers."""

    emit: str | None
    folder: Path
    fleet: "Fleet"
    force: bool
    html: Path | None
    as_json: bool
    table: Path | None = None
    """Of mixed formats."""

    def check(self) -> None:
        """Refuse what cannot be written, before anything is worked out."""
        if self.emit is not None:
            from quantkit.serving import emit as emitting

            emitting.check(self.emit, self.folder, self.fleet, self.force)
            return
        for given, option in ((self.fleet.image, "--image"), (self.fleet.is_scaled, "--replicas")):
            if given:
                raise typer.BadParameter("goes with --emit", param_hint=option)

    def write(self, answers: "Answers", asked: "Asked") -> None:
        from quantkit.advise import document
        from quantkit.cli import console, recommend_view

        if self.html is not None:
            from quantkit.advise import page
            from quantkit.storage import write_text

            write_text(self.html, page.render(answers.found))
        if self.as_json:
            plan = answers.plan
            told = document.to_json(answers.found, answers.across, answers.notes)
            told = told if plan is None else {**told, "serving": plan.to_json()}
            if self.table is not None:
                told = {**told, "mixed": _mixed(self.table, asked).to_json()}
            console.print_json({**told, "make": list(answers.make)} if answers.make else told)
        elif len(asked.models) > 1:
            recommend_view.show_models(answers)
        elif len(answers.found) == 1:
            recommend_view.show(answers)
            if self.table is not None:
                for line in _mixed(self.table, asked).words:
                    console.say(line)
        elif self.html is None:  # which has it all, and more
            recommend_view.show_many(answers.found, answers.notes)
        if self.html is not None:
            typer.echo(f"written: {self.html}", err=True)
        if self.emit is not None:
            self._emit(self.emit, answers, asked)

    def _emit(self, kind: str, answers: "Answers", asked: "Asked") -> None:
        from dataclasses import replace

        from quantkit.cli import serving_view
        from quantkit.serving.fleet import Targets

        plan = answers.plan
        if plan is None:
            raise AdviceError("nothing serves it, so there is no plan to write")
        speed = answers.found[0].chosen.speed if answers.found[0].chosen else None
        slow = speed.first_token.high if speed and speed.first_token else 0.0
        # What was asked for, or more than the slow end of what was estimated.
        targets = Targets(asked.limits.ttft or max(1.0, round(1.2 * slow, 1)), asked.limits.tpot)
        if plan.target.recipe is not None:
            # Of a checkpoint that is yet to be made the whole path: files for it may lie elsewhere.
            path = str(Path(plan.target.path).absolute())
            plan = replace(plan, target=replace(plan.target, path=path))
        fleet = replace(self.fleet, targets=targets)
        serving_view.write_files(
            serving_view.made_files(plan, kind, self.folder, fleet, self.force)
        )


@dataclass(frozen=True)
class Described:
    """A GPU in the user's own words."""

    memory: str | None
    bandwidth: str | None
    capability: str | None
    tflops: float | None

    def gpus(self, names: str | None) -> "list[GPU]":
        """The GPUs that were named, or the one that was described."""
        from quantkit.hardware import gpus

        given = [o for o in (self.memory, self.bandwidth, self.capability, self.tflops) if o]
        if names == "cpu":
            return [self._cpu()]
        if names is not None and given:
            raise typer.BadParameter(
                "--gpu names a GPU; --memory, --bandwidth, --capability and --tflops describe one "
                "that is not listed: give either"
            )
        if names is None:
            return [self._described()]
        if names == "all":
            return list(gpus.load())
        found = [gpus.find(name.strip()) for name in names.split(",") if name.strip()]
        if not found:
            raise typer.BadParameter("--gpu names none")
        for name in (name.strip() for name in names.split(",")):
            if name not in ("", "auto") and (others := gpus.siblings(name)):
                taken = gpus.find(name).name
                typer.echo(
                    f"{name} is taken as {taken}; there is also {', '.join(others)}", err=True
                )
        return list({gpu.name: gpu for gpu in found}.values())

    def _described(self) -> "GPU":
        from quantkit.hardware import gpus

        if self.memory is None:
            raise typer.BadParameter(
                "which GPU? Name one with --gpu (`quantkit gpus` lists them), or give --memory "
                "and --bandwidth of any other"
            )
        try:
            return gpus.describe(
                self.memory, self.bandwidth, self.capability, fp16_tflops=self.tflops
            )
        except HardwareError as error:  # they are the options' own values
            raise UsageError(str(error)) from error

    def _cpu(self) -> "GPU":
        """This machine's CPU, or one with the memory that was named."""
        from quantkit.hardware import gpus
        from quantkit.serving import device

        if self.capability is not None:
            raise typer.BadParameter("a CPU has no compute capability", param_hint="--capability")
        try:
            size = None if self.memory is None else gpus.printed_bytes(self.memory)
            rate = self.bandwidth and gpus.parse_bytes(self.bandwidth, per_second=True) / 1e9
        except HardwareError as error:
            raise UsageError(str(error)) from error
        return device.cpu(size, rate or None, self.tflops)


def _prices(path: Path | None) -> "Prices | None":
    if path is None:
        return None
    from quantkit.hardware import prices

    return prices.read(path)


def _host(memory: str | None, bandwidth: str | None, gpu: "GPU") -> "Host | None":
    """The machine around the GPU, where its memory may be used."""
    if memory is None and bandwidth is None:
        return None
    from quantkit.advise import offload
    from quantkit.hardware import gpus

    if memory is None:
        raise typer.BadParameter("goes with --host-memory", param_hint="--host-bandwidth")
    try:
        size = gpus.printed_bytes(memory)
        if bandwidth is None:
            rate = offload.usual_host(gpu).bandwidth_gb_s
        else:
            rate = gpus.parse_bytes(bandwidth, per_second=True) / 1e9
    except HardwareError as error:
        raise UsageError(str(error)) from error
    return offload.Host(rate, size, f"{memory.strip()} of host memory")
