"""Measure how fast checkpoints serve."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.bench.measure import Plan
    from quantkit.bench.model import Model
    from quantkit.bench.record import Bench, Target
    from quantkit.progress import Progress


@dataclass(frozen=True)
class Engine:
    """What serves the requests."""

    backend: str = "vllm"
    """vllm, llama.cpp, or server: one that is already running."""
    server: str | None = None
    model: str | None = None
    """The server's name for it, if it serves several."""
    python: str | None = None
    llama_server: str | None = None
    arguments: Sequence[str] = ()
    """Further flags, passed through to the engine."""
    start_timeout: float = 900.0
    offline: bool = False
    """Batches in vLLM's own process, without a server."""


@dataclass(frozen=True)
class Traffic:
    """What is requested, when, and how often; lists of numbers are written as N,M."""

    prompt: str = "512"
    output: str = "128"
    shared_prefix: int = 0
    trace: Path | None = None
    calibration: str | None = None
    concurrency: str | None = None
    rate: str | None = None
    arrivals: str = "poisson"
    requests: int | None = None
    warmup: int | None = None
    repeat: int = 1
    timeout: float = 300.0
    seed: int = 0


@dataclass(frozen=True)
class Goal:
    """The latency target, and the price of a GPU."""

    ttft: str | None = None
    tpot: str | None = None
    attain: float = 99.0
    """Percent of requests."""
    gpu_hour: float | None = None
    gpus: int | None = None
    """Number of GPUs that serve; None: from the flags, or 1."""


@dataclass(frozen=True)
class Measuring:
    """One call of `bench`."""

    checkpoints: Sequence[Path]
    engine: Engine = field(default_factory=Engine)
    traffic: Traffic = field(default_factory=Traffic)
    goal: Goal = field(default_factory=Goal)
    sweep: Sequence[str] = ()
    """Serving flags to try, as FLAG=A,B."""
    out: Path | None = None
    force: bool = False

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return hub.set_needs(self.traffic.calibration) or hub.any_named(self.checkpoints)

    def ready(self, notify: Notify = silent) -> "Work[Bench]":
        """Validate before an engine is started."""
        from quantkit.bench import settings
        from quantkit.bench.model import Model

        grid = settings.grid(list(self.sweep))
        for path in self.checkpoints:
            Model.of(path)
        validation.file(self.traffic.trace)
        validation.calibration(self.traffic.calibration)
        validation.output(self.out)
        from quantkit.bench import arguments, files, run

        if self.out is not None:
            files.refuse_existing(self.out, self.force)
        target = arguments.target(self.goal.ttft, self.goal.tpot, self.goal.attain)
        served = run.models(list(self.checkpoints))

        def work(progress: "Progress") -> "Bench":
            from quantkit.storage import output_folder

            with output_folder(self.out) if self.out is not None else nullcontext():
                plan = self._plan(served, target, progress)
                bench = self._measured(served, grid, plan, progress)
                if self.out is not None:
                    files.write(bench, self.out)
            return bench

        return work

    def _plan(self, served: "list[Model]", target: "Target | None", progress: "Progress") -> "Plan":
        """The requests and their arrival."""
        from quantkit.bench import arguments
        from quantkit.bench.engines import n_gpus
        from quantkit.bench.measure import Plan
        from quantkit.bench.workloads import Recorded

        asked, offline = self.traffic, self.engine.offline
        lengths = arguments.Lengths(asked.prompt, asked.output, asked.shared_prefix)
        recording = arguments.Recording(asked.trace, asked.calibration, asked.requests, asked.seed)
        first = served[0].path if served else None
        sources = arguments.sources(lengths, recording, first, progress)
        recorded = sources[0] if isinstance(sources[0], Recorded) else None
        if offline and recorded:
            raise UsageError(
                "--offline measures fixed lengths; --trace and --calibration need a server"
            )
        loads = arguments.loads(asked.concurrency, asked.rate, asked.arrivals, recorded, offline)
        return Plan(
            sources,
            loads,
            asked.requests,
            asked.warmup,
            asked.repeat,
            asked.timeout,
            asked.seed,
            target,
            self.goal.gpu_hour,
            self.goal.gpus or n_gpus(list(self.engine.arguments)),
            os.environ.get("OPENAI_API_KEY"),
        )

    def _measured(
        self,
        served: "list[Model]",
        grid: "list[dict[str, str]]",
        plan: "Plan",
        progress: "Progress",
    ) -> "Bench":
        from quantkit.bench import files, run
        from quantkit.bench.engines import Program

        engine = self.engine
        if engine.backend == "server":
            one = served[0] if served else None
            return run.server_run(engine.server or "", one, engine.model, plan, progress)
        program = Program.find(
            engine.backend,
            engine.python,
            engine.llama_server,
            list(engine.arguments),
            engine.start_timeout,
        )
        kept = run.Outputs()
        if self.out is not None:
            kept = run.Outputs(files.log_folder(self.out), partial(files.write, out=self.out))
        return run.engine_run(program, served, grid, plan, progress, engine.offline, kept)
