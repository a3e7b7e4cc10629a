"""Recommend a format to serve a model in."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.calls import Notify, Work, hub, silent
from quantkit.calls.serve import Additions, Files
from quantkit.errors import AdviceError, HardwareError, UsageError

if TYPE_CHECKING:
    from quantkit.advise.mixed import Advice
    from quantkit.advise.offload import Host
    from quantkit.hardware.gpus import GPU
    from quantkit.progress import Progress
    from quantkit.report.document import Document
    from quantkit.serving.fleet import Fleet
    from quantkit.serving.questions import Answers, Query


@dataclass(frozen=True)
class Place:
    """GPUs by name, or one described by its figures, and the machine around it."""

    names: str | None = None
    memory: str | None = None
    bandwidth: str | None = None
    capability: str | None = None
    tflops: float | None = None
    host_memory: str | None = None
    host_bandwidth: str | None = None

    def gpus(self, notify: Notify = silent) -> "list[GPU]":
        """The GPUs that were named, or the one that was described."""
        from quantkit.hardware import gpus

        given = [o for o in (self.memory, self.bandwidth, self.capability, self.tflops) if o]
        if self.names == "cpu":
            return [self._cpu()]
        if self.names is not None and given:
            raise UsageError(
                "--gpu names a GPU; --memory, --bandwidth, --capability and --tflops describe one "
                "that is not listed: give either"
            )
        if self.names is None:
            return [self._described()]
        if self.names == "all":
            return list(gpus.load())
        names = [name.strip() for name in self.names.split(",") if name.strip()]
        if not names:
            raise UsageError("--gpu is empty; name a GPU")
        found = [gpus.find(name) for name in names]
        for name, gpu in zip(names, found, strict=True):
            if name != "auto" and (others := gpus.siblings(name)):
                notify(f"{name} is taken as {gpu.name}; also known: {', '.join(others)}")
        return list({gpu.name: gpu for gpu in found}.values())

    def host(self, gpu: "GPU") -> "Host | None":
        """The host, if its memory may be used."""
        if self.host_memory is None and self.host_bandwidth is None:
            return None
        from quantkit.advise import offload
        from quantkit.hardware import gpus

        if self.host_memory is None:
            raise UsageError("--host-bandwidth needs --host-memory")
        try:
            size = gpus.printed_bytes(self.host_memory)
            if self.host_bandwidth is None:
                rate = offload.usual_host(gpu).bandwidth_gb_s
            else:
                rate = gpus.parse_bytes(self.host_bandwidth, per_second=True) / 1e9
        except HardwareError as error:
            raise UsageError(str(error)) from error
        return offload.Host(rate, size, f"{self.host_memory.strip()} of host memory")

    def _described(self) -> "GPU":
        from quantkit.hardware import gpus

        if self.memory is None:
            raise UsageError(
                "no GPU is named: give --gpu NAME (`quantkit gpus` lists them), or describe one "
                "that is not listed with --memory and --bandwidth"
            )
        try:
            return gpus.describe(
                self.memory, self.bandwidth, self.capability, fp16_tflops=self.tflops
            )
        except HardwareError as error:  # the values come from options
            raise UsageError(str(error)) from error

    def _cpu(self) -> "GPU":
        """This machine's CPU, or one with the given memory."""
        from quantkit.hardware import gpus
        from quantkit.serving import device

        if self.capability is not None:
            raise UsageError("--capability: a CPU has no compute capability")
        try:
            size = None if self.memory is None else gpus.printed_bytes(self.memory)
            rate = self.bandwidth and gpus.parse_bytes(self.bandwidth, per_second=True) / 1e9
        except HardwareError as error:
            raise UsageError(str(error)) from error
        return device.cpu(size, rate or None, self.tflops)


@dataclass(frozen=True)
class Load:
    """The load on the server, and how GPUs share the model."""

    count: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    expert_parallel: bool = False
    context: int | None = None
    answer: int | None = None
    shared_prefix: int | None = None
    users: int | None = None
    profile: str | None = None


@dataclass(frozen=True)
class Aims:
    """Objectives and limits."""

    objective: str | None = None
    min_quality: float | None = None
    ttft: str | None = None
    tpot: str | None = None


@dataclass(frozen=True)
class Evidence:
    """What is known about the model and about prices."""

    reports: "Sequence[Path | Document]" = ()
    bench: Path | None = None
    gpu_hour: float | None = None
    prices: Path | None = None
    sensitivity: Path | None = None
    """A sensitivity table, to see what mixed formats gain."""


@dataclass(frozen=True)
class Advised:
    """The result."""

    asked: "Query"
    answers: "Answers"
    files: Files
    fleet: "Fleet"
    mixed: "Advice | None" = None

    def emitted(self) -> list[Path]:
        """Write the plan's files; refused if there is no plan."""
        from quantkit.serving import emit
        from quantkit.serving.fleet import Targets

        plan, limits = self.answers.plan, self.asked.limits
        if plan is None:
            raise AdviceError("no format fits, so there is no plan to write")
        chosen = self.answers.found[0].chosen
        speed = chosen.speed if chosen else None
        slow = speed.first_token.high if speed and speed.first_token else 0.0
        # The request, or more than the slow end of the estimate.
        targets = Targets(limits.ttft or max(1.0, round(1.2 * slow, 1)), limits.tpot)
        if plan.target.recipe is not None:
            # The full path for a checkpoint yet to be made: its files may be elsewhere.
            path = str(Path(plan.target.path).absolute())
            plan = replace(plan, target=replace(plan.target, path=path))
        fleet, asked = replace(self.fleet, targets=targets), self.files
        texts = emit.placed(plan, asked.kind or "", asked.folder, fleet, asked.force)
        emit.write(texts)
        return list(texts)


@dataclass(frozen=True)
class Advising:
    """One call of `recommend`."""

    models: Sequence[str]
    """Folders, hub ids, config.json files, or sizes such as 70B."""
    place: Place
    load: Load = field(default_factory=Load)
    aims: Aims = field(default_factory=Aims)
    evidence: Evidence = field(default_factory=Evidence)
    additions: Additions = field(default_factory=Additions)
    acceptance: str | None = None
    """Acceptance rate of the draft."""
    files: Files = field(default_factory=Files)
    html: Path | None = None

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return not all(map(hub.is_local, self.models))

    def ready(self, notify: Notify = silent) -> "Work[Advised]":
        """Refuse conflicting options and outputs that cannot be written."""
        fleet = self.files.fleet()
        self._refuse_a_gpu_as_model()
        gpus = self.place.gpus(notify)
        self._check(len(gpus))
        asked = self._asked(gpus)

        def work(progress: "Progress") -> Advised:
            from quantkit.serving import questions

            answers = questions.answer(asked)
            if self.html is not None:
                from quantkit.advise import page
                from quantkit.storage import write_text

                write_text(self.html, page.render(answers.found, answers.commands))
            return Advised(asked, answers, self.files, fleet, self._mixed(asked))

        return work

    def _refuse_a_gpu_as_model(self) -> None:
        """`recommend 8B L4` is a GPU without its option."""
        from quantkit.hardware import gpus

        for model in self.models:
            if gpus.is_known(model) and not Path(model).exists():
                raise UsageError(f"{model} is a GPU; write --gpu {shlex.quote(model)}")

    def _check(self, n_gpus: int) -> None:
        known, is_one = self.evidence, n_gpus == 1 and len(self.models) == 1
        if known.gpu_hour is not None and n_gpus > 1:
            raise UsageError("--gpu-hour is the price of one GPU; name one with --gpu")
        if known.gpu_hour is not None and known.prices is not None:
            raise UsageError("--gpu-hour and --prices both name a price; give one")
        if not is_one and (known.bench is not None or self.files.kind is not None):
            raise UsageError("--bench and --emit are for one model on one GPU")
        if not is_one and known.sensitivity is not None:
            raise UsageError("--sensitivity is for one model on one GPU")

    def _asked(self, gpus: "list[GPU]") -> "Query":
        from quantkit.advise.question import Limits, check_objective
        from quantkit.advise.split import SplitConstraint
        from quantkit.engine.durations import seconds
        from quantkit.hardware import prices
        from quantkit.serving import adapters, questions

        load, aims, known, more = self.load, self.aims, self.evidence, self.additions
        if aims.objective is not None:
            check_objective(aims.objective)
        drafting = None
        if more.draft:
            drafting = questions.Drafting(
                more.draft, self.acceptance, more.draft_tokens, more.draft_sampling
            )
        return questions.Query(
            models=tuple(self.models),
            gpus=tuple(gpus),
            count=load.count,
            constraint=SplitConstraint(
                load.tensor_parallel, load.pipeline_parallel, load.expert_parallel
            ),
            context=load.context,
            answer=load.answer,
            users=load.users,
            objective=aims.objective,
            min_quality=aims.min_quality,
            reports=tuple(known.reports),
            gpu_hour=known.gpu_hour,
            prices=None if known.prices is None else prices.read(known.prices),
            bench=known.bench,
            drafting=drafting,
            adapters=adapters.parse(
                list(more.lora), is_gguf=False, slots=more.max_loras, on_host=more.max_cpu_loras
            ),
            profile=load.profile,
            limits=Limits(seconds(aims.ttft, "--ttft"), seconds(aims.tpot, "--tpot")),
            shared_prefix=load.shared_prefix or 0,
            host=self.place.host(gpus[0]),
        )

    def _mixed(self, asked: "Query") -> "Advice | None":
        """Mixed formats that fit the GPU's memory."""
        if self.evidence.sensitivity is None:
            return None
        from quantkit.advise.mixed import advice

        (model,), (gpu,) = asked.models, asked.gpus
        count, users = asked.count or 1, asked.users or 1
        return advice(model, self.evidence.sensitivity, gpu.name, count, asked.context, users)
