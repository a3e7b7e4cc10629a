"""Serve a checkpoint: the server's plan, its files, and the server itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quantkit.calls import Notify, Work, hub, silent

if TYPE_CHECKING:
    from quantkit.progress import Progress
    from quantkit.serving.fleet import Fleet
    from quantkit.serving.plan import Plan
    from quantkit.serving.program import Program
    from quantkit.serving.server import Answer, Server
    from quantkit.serving.target import Target


@dataclass(frozen=True)
class Setup:
    """What a server is set up for."""

    profile: str = "chat"
    gpu: str = "auto"
    count: int = 1
    context: int | None = None
    users: int | None = None
    kv_cache: str = "auto"
    utilisation: float = 0.9
    host: str = "127.0.0.1"
    port: int = 8000
    flags: Sequence[str] = ()
    """Passed to the engine in place of quantkit's own choice."""


@dataclass(frozen=True)
class Additions:
    """What is served besides the model: a draft, and adapters."""

    draft: str | None = None
    draft_tokens: int | None = None
    draft_sampling: str | None = None
    lora: Sequence[str] = ()
    max_loras: int | None = None
    max_cpu_loras: int | None = None


@dataclass(frozen=True)
class Engine:
    """Where engines are, and whether one is required."""

    python: Path | None = None
    llama_server: Path | None = None
    is_needed: bool = True

    def find(self, plan: "Plan", gpu: str) -> "Program | None":
        """The engine for a plan, if one is named or needed; a plan can be made without one."""
        from quantkit.serving import device, program

        if self.python or self.llama_server or self.is_needed:
            return program.find(plan.engine, device.find(gpu), self.python, self.llama_server)
        return None


@dataclass(frozen=True)
class Files:
    """What `--emit` writes, and where."""

    kind: str | None = None
    folder: Path = Path()
    image: str | None = None
    replicas: str | None = None
    ttft: str | None = None
    tpot: str | None = None
    force: bool = False

    def fleet(self) -> "Fleet":
        """What the files contain besides the plan; invalid values are refused."""
        from quantkit.engine.durations import seconds
        from quantkit.serving.fleet import SLOW_TTFT, Fleet, Targets
        from quantkit.serving.fleet import replicas as parsed

        least, most = parsed(self.replicas)
        targets = Targets(seconds(self.ttft, "--ttft") or SLOW_TTFT, seconds(self.tpot, "--tpot"))
        fleet = Fleet(least, most, targets, self.image, is_scaled=self.replicas is not None)
        if self.kind is not None:
            from quantkit.serving import emit

            emit.check(self.kind, self.folder, fleet, self.force)
        return fleet


@dataclass(frozen=True)
class Planned:
    """How a checkpoint is served."""

    target: "Target"
    plan: "Plan"
    engine: "Program | None"
    fleet: "Fleet"


@dataclass(frozen=True)
class Planning:
    """One call of `serve --dry-run`, and the first part of the others."""

    checkpoint: Path
    setup: Setup = field(default_factory=Setup)
    additions: Additions = field(default_factory=Additions)
    engine: Engine = field(default_factory=Engine)
    files: Files = field(default_factory=Files)

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return hub.any_named([self.checkpoint])

    def ready(self, notify: Notify = silent) -> "Work[Planned]":
        """All of it is quick: only the sizes of a checkpoint's files are read."""
        from quantkit.export.manifest import Manifest

        planned = self.planned()
        if planned.target.has_manifest:
            Manifest.read(planned.target.folder).require_whole(planned.target.folder)
        if planned.engine is not None:
            return lambda progress: planned
        from quantkit.serving import program

        here = program.look(planned.plan.engine)
        missing = program.missing(planned.plan.engine)
        note = f"{missing} on this machine; run this command where it is installed"
        plan = planned.plan if here is not None else planned.plan.with_note(note)
        return lambda progress: replace(planned, plan=plan, engine=here)

    def planned(self) -> Planned:
        """The plan, and the engine if one is required."""
        from quantkit.serving import adapters, device, draft, plan, target

        fleet, wanted, more = self.files.fleet(), self.setup, self.additions
        model = target.open_target(self.checkpoint)
        loras = adapters.parse(list(more.lora), model.is_gguf, more.max_loras, more.max_cpu_loras)
        demand = plan.Demand(
            gpu=device.find(wanted.gpu),
            count=wanted.count,
            context=wanted.context,
            users=wanted.users,
            profile=wanted.profile,
            kv_bits=plan.kv_bits(wanted.kv_cache),
            utilisation=wanted.utilisation,
            draft=draft.parse(more.draft, model, more.draft_tokens, sampling=more.draft_sampling),
            adapters=loras,
            host=wanted.host,
            port=wanted.port,
        )
        made = plan.make(model, demand).with_extra(list(wanted.flags))
        return Planned(model, made, self.engine.find(made, wanted.gpu), fleet)


@dataclass(frozen=True)
class Emission:
    """One call of `serve --emit`."""

    planning: Planning
    check: bool = True
    """Whether the folder is checked first."""
    only_named: bool = False
    """Whether files are only named, not written."""

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return self.planning.needs_hub

    def ready(self, notify: Notify = silent) -> "Work[list[Path]]":
        """Refuse what cannot be written."""
        from quantkit.serving import emit, images

        planned, asked = self.planning.planned(), self.planning.files
        fleet, engine = planned.fleet, planned.engine
        has_python = self.planning.engine.python is not None
        if asked.image is None and has_python and engine and asked.kind != "grafana":
            fleet = replace(fleet, image=images.tag_of(engine.version))
        texts = emit.placed(planned.plan, asked.kind or "", asked.folder, fleet, asked.force)

        def work(progress: "Progress") -> list[Path]:
            if self.check:
                _check(planned, progress)
            if not self.only_named:
                emit.write(texts)
            return list(texts)

        return work


class Audience(Protocol):
    """Receives the progress of a server's start."""

    def planned(self, planned: Planned) -> None:
        """Called before it is started."""

    def answered(self, planned: Planned, server: "Server", answer: "Answer") -> None:
        """Called when it has answered for the first time."""


@dataclass(frozen=True)
class Serving:
    """One call of `serve`: a server that runs until it is interrupted."""

    planning: Planning
    audience: Audience
    timeout: float = 900.0
    log: Path | None = None
    check: bool = True
    once: bool = False
    """Whether it stops after one answer, as a test."""

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return self.planning.needs_hub

    def ready(self, notify: Notify = silent) -> "Work[None]":
        """Refuse a port that is taken, and a machine without the engine."""
        from quantkit.serving import server

        planned = self.planning.planned()
        server.refuse_taken(*planned.plan.address)

        def work(progress: "Progress") -> None:
            if self.check:
                _check(planned, progress)
            self.audience.planned(planned)
            self._serve(planned, progress)

        return work

    def _serve(self, planned: Planned, progress: "Progress") -> None:
        from quantkit.serving import server

        assert planned.engine is not None  # for it was needed
        with server.running(
            planned.plan, planned.engine, self.timeout, progress, self.log
        ) as running:
            self.audience.answered(planned, running, running.ask())
            if self.once:
                return
            try:
                progress.note(f"\nserving at {running.url}/v1 until Ctrl-C")
                running.stay()
            except KeyboardInterrupt:
                progress.note("ending the server")
        progress.note("ended")


def _check(planned: Planned, progress: "Progress") -> None:
    from quantkit.serving.check import check

    check(planned.target, progress)
