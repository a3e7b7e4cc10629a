"""A whole run: every checkpoint with every setting, each in an engine of its own."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import quantkit
from quantkit.bench import choice, compare, cpu, engines, memory, offline
from quantkit.bench.compare import Samples
from quantkit.bench.engines import Program
from quantkit.bench.measure import Plan, measure
from quantkit.bench.model import Model
from quantkit.bench.record import Bench, Machine, Refusal, Row
from quantkit.engine import label
from quantkit.errors import EngineError
from quantkit.export.manifest import now
from quantkit.progress import Progress

SLOW_CLIENT_S = 0.05
HERE = ("localhost", "127.0.0.1", "::1")


def models(paths: Sequence[Path]) -> list[Model]:
    """All models to serve, each under a unique name."""
    found = [Model.of(path) for path in paths]
    names = [model.name for model in found]
    if len(set(names)) < len(names):
        found = [Model(m.path, str(m.path), m.digest) for m in found]
    return found


@dataclass(frozen=True)
class _Results:
    rows: list[Row]
    refusals: list[Refusal]
    versions: set[str]
    samples: list[Samples] = field(default_factory=list)
    """Request times of every row; empty if they are unknown."""


@dataclass(frozen=True)
class _Setup:
    plan: Plan
    progress: Progress
    direct: bool
    """In the engine's own process, without a server."""


@dataclass(frozen=True)
class Outputs:
    """Output written while further engines are still to run."""

    logs: Path | None = None
    keep: Callable[[Bench], None] | None = None
    """Receives the results so far after every engine, so that an interrupted sweep leaves
    something.
    """


def engine_run(
    program: Program,
    served: Sequence[Model],
    settings: Sequence[Mapping[str, str]],
    plan: Plan,
    progress: Progress,
    direct: bool = False,
    kept: Outputs | None = None,
) -> Bench:
    """Start an engine for every model and setting, measure, stop it. A refusal is a result too."""
    kept, how = kept or Outputs(), _Setup(plan, progress, direct)
    found = _Results([], [], set())
    more: dict[str, object] = {"engine_arguments": list(program.arguments)}
    if program.environment:
        more["engine_environment"] = dict(program.environment)
        progress.note(cpu.sentence(program.environment))
    for number, (model, setting) in enumerate(product(served, settings), start=1):
        shown = " ".join(f"{name}={value}" for name, value in setting.items()) or "default flags"
        progress.note(f"{model.name}, {shown}: starting {label(program.engine)}")
        log = kept.logs / f"{number:02}-{Path(model.name).name}.log" if kept.logs else None
        try:
            _one(program, model, setting, how, log, found)
        except EngineError as error:
            refusal = Refusal(model=model.name, setting=dict(setting), reason=str(error))
            found.refusals.append(refusal)
            progress.note(f"{model.name}, {shown}: {refusal.brief}")
        if kept.keep is not None and found.rows:
            kept.keep(_bench(program.engine, found, plan, more))
    if not found.rows:
        raise EngineError(f"nothing could be measured. {found.refusals[0].reason}")
    return _bench(program.engine, found, plan, more)


def n_gpus_of(plan: Plan, setting: Mapping[str, str]) -> int:
    """GPUs that serve with a setting: a sweep may use a larger tensor-parallel size."""
    return max(plan.n_gpus, int(setting.get("tensor_parallel", "1")))


def _one(
    program: Program,
    model: Model,
    setting: Mapping[str, str],
    how: _Setup,
    log: Path | None,
    found: _Results,
) -> None:
    plan = replace(how.plan, n_gpus=n_gpus_of(how.plan, setting))
    if how.direct:
        rows = offline.measure(program, plan, model, setting, found.versions, log)
        found.rows.extend(rows)
        found.samples.extend([] for _ in range(len(found.rows) - len(found.samples)))
        return
    with engines.started(program, model.path, model.name, setting, log) as running:
        found.versions.add(running.version or "unknown")
        measured = measure(running, plan, model.name, model.digest, setting, how.progress)
        for row, samples in measured:
            found.rows.append(row)
            found.samples.append(samples)


def server_run(
    url: str, model: Model | None, served_name: str | None, plan: Plan, progress: Progress
) -> Bench:
    """Measure a server that is already running."""
    running = engines.connect(url, served_name, plan.api_key)
    if model is not None and served_name is None and running.model != model.name:
        known = Path(running.model).name
        if known != model.name:
            raise EngineError(
                f"{url} serves {running.model}, not {model.name}; if it is the same model, "
                f"say so with --model {running.model}"
            )
    # llama.cpp's server names its model by the file's full path.
    shown = Path(running.model).name if running.model.startswith("/") else running.model
    label = model.name if model else shown
    digest = model.digest if model else None
    found = _Results([], [], set())
    for row, samples in measure(running, plan, label, digest, {}, progress):
        found.rows.append(row)
        found.samples.append(samples)
    found.versions.add(running.version or "unknown")
    elsewhere = running.address.host not in HERE
    return _bench(running.engine, found, plan, {"server": running.address.url}, elsewhere)


def _bench(
    engine: str,
    found: _Results,
    plan: Plan,
    more: Mapping[str, object],
    elsewhere: bool = False,
) -> Bench:
    versions = sorted(found.versions - {"unknown"})
    return Bench(
        engine=engine,
        engine_version=", ".join(versions) or None,
        machine=Machine(
            processor=platform.machine(),
            n_cpus=os.cpu_count() or 1,
            gpus=[] if elsewhere else memory.gpu_names(),
            client_only=elsewhere,
        ),
        versions={"quantkit": quantkit.__version__, "python": platform.python_version()},
        created=now(),
        options={
            "repetitions": plan.repetitions,
            "warmup": plan.n_warmup,
            "seed": plan.seed,
            "timeout_s": plan.timeout_s,
            **more,
        },
        gpu_hour=plan.gpu_hour,
        n_gpus=plan.n_gpus,
        target=plan.target,
        rows=found.rows,
        refusals=found.refusals,
        choices=choice.choose(found.rows, plan.target),
        comparisons=list(compare.compare(found.rows, found.samples)),
        notes=list(_notes(found.rows)),
    )


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Caveats about the figures."""
    failed = sum(row.n_failed for row in rows)
    if failed:
        total = sum(row.n_requests for row in rows)
        yield (
            f"{failed} of {total} requests failed; latency and throughput leave them out, and they "
            "count as missing any target"
        )
    if short := sum(row.n_short for row in rows):
        yield f"{short} answers were shorter than asked for: the server ignores the length"
    late = [row for row in rows if (row.lag_p99_s or 0) > SLOW_CLIENT_S]
    if late:
        worst = max(row.lag_p99_s or 0 for row in late)
        yield (
            f"this client sent late, by up to {1000 * worst:.0f} ms: the client is a bottleneck; "
            "run it on another machine than the server, or lower the load"
        )
