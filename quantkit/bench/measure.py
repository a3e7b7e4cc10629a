"""Measures one server under one load after the other: warm-up, repetitions, a row for each."""

import asyncio
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.bench import figures, load, metrics
from quantkit.bench.arrivals import Load
from quantkit.bench.client import Client
from quantkit.bench.compare import Sample, Samples
from quantkit.bench.engines import Running
from quantkit.bench.record import Press, Repetition, Row, Target
from quantkit.bench.request import Outcome, Request
from quantkit.bench.workloads import HIGHEST, LOWEST, Recorded, Source
from quantkit.errors import EngineError
from quantkit.progress import Progress

CHARACTERS_PER_TOKEN = 4

DYING_S = 3.0
"""Seconds that an engine may take to exit after requests have failed."""


@dataclass(frozen=True)
class Plan:
    """How every measurement is taken."""

    workloads: Sequence[Source]
    loads: Sequence[Load]
    n_requests: int | None = None
    """Per repetition; by default as many as the load needs."""
    n_warmup: int | None = None
    """By default as many as there are users."""
    repetitions: int = 1
    timeout_s: float = 300.0
    seed: int = 0
    target: Target | None = None
    gpu_hour: float | None = None
    n_gpus: int = 1
    api_key: str | None = None

    @property
    def n_passes(self) -> int:
        """Passes over each workload in the lifetime of a server."""
        return len(self.loads) * self.repetitions


def measure(
    running: Running,
    plan: Plan,
    label: str,
    digest: str | None,
    setting: Mapping[str, str],
    progress: Progress,
) -> Iterator[tuple[Row, Samples]]:
    """Rows of one model with one setting, each as soon as it is complete, with request times."""
    for workload in plan.workloads:
        for press in plan.loads:
            case = _Case(running, plan, workload, press, progress)
            outcomes, passes, watch = asyncio.run(case.run())
            # Requests fail before a dying engine has exited.
            running.check(DYING_S if any(not outcome.ok for outcome in outcomes) else 0.0)
            row = _row(outcomes, passes, plan, press, workload)
            row = row.model_copy(
                update={
                    "model": label,
                    "digest": digest,
                    "setting": dict(setting),
                    "metrics": watch.result(),
                    "cold_start_s": running.cold_start_s,
                    "gpu_peak_bytes": running.gpu_peak_bytes,
                    "weight_bytes": running.weight_bytes,
                    "kv_tokens": running.kv_tokens,
                }
            )
            yield row, [Sample.of(outcome) for outcome in outcomes]


@dataclass(frozen=True)
class _Case:
    running: Running
    plan: Plan
    workload: Source
    press: Load
    progress: Progress

    async def run(self) -> tuple[list[Outcome], list[Repetition], metrics.Watch]:
        await self._warm_up()
        outcomes: list[Outcome] = []
        passes: list[Repetition] = []
        key = self.plan.api_key
        async with metrics.watched(self.running.address, key) as watch:
            for number in range(self.plan.repetitions):
                seed = self._seed(number)
                requests = self._requests(seed)
                found = await self._once(requests, seed, number)
                sent = [len(r.prompt) if isinstance(r.prompt, list) else None for r in requests]
                passes.append(figures.repetition(found, sent))
                outcomes += found
        return outcomes, passes, watch

    def _seed(self, number: int) -> int:
        """The same for all models; another for every load, or a cache would know the prompts."""
        about = self.workload.about.model_dump_json()
        return zlib.crc32(f"{self.plan.seed} {about} {self.press.name} {number}".encode())

    def _requests(self, seed: int) -> list[Request]:
        n = self.plan.n_requests
        if n is None and not isinstance(self.workload, Recorded):
            n = self.press.n_requests()
        return self.workload.requests(n, seed)

    async def _once(self, requests: list[Request], seed: int, number: int) -> list[Outcome]:
        times = self.press.times(requests, seed)
        self.progress.start(self.press.name, len(requests), "requests")
        ask = self._client(number).ask

        def tick() -> None:
            self.progress.advance(1)

        try:
            if times is None:
                return await load.closed(requests, ask, self.press.concurrency or 1, tick)
            return await load.scheduled(requests, times, ask, tick)
        finally:
            self.progress.finish()

    def _client(self, number: int) -> Client:
        # Without these, a second round over the same prompts would be answered from the cache.
        extra: dict[str, Any] = {}
        if self.running.engine == "vllm":
            extra["cache_salt"] = f"quantkit-{self._seed(number)}"
        again = isinstance(self.workload, Recorded) and self.plan.n_passes > 1
        if self.running.engine == "llama.cpp" and again:
            extra["cache_prompt"] = False
        key, timeout_s = self.plan.api_key, self.plan.timeout_s
        return Client(self.running.address, self.running.model, timeout_s, key, extra)

    async def _warm_up(self) -> None:
        """Requests like the real ones, but with other tokens; if all fail, nothing is measured."""
        users = self.press.concurrency or 4
        n = users if self.plan.n_warmup is None else self.plan.n_warmup
        if n == 0:
            return
        draw = random.Random(f"{self._seed(-1)} warm-up")
        some = [_alike(request, draw) for request in self.workload.requests(n, self._seed(-1))]
        outcomes = await load.closed(some, self._client(-1).ask, users)
        if not any(outcome.ok for outcome in outcomes):
            self.running.check()
            counts, words = figures.failures(outcomes)
            kind = next(iter(counts))
            raise EngineError(
                f"all {len(outcomes)} requests of the warm-up failed at "
                f"{self.running.address.url}: {kind}: {words[kind]}"
            )


def _alike(request: Request, draw: random.Random) -> Request:
    n = len(request.prompt)
    n = n if isinstance(request.prompt, list) else max(1, n // CHARACTERS_PER_TOKEN)
    return Request([draw.randrange(LOWEST, HIGHEST) for _ in range(n)], request.n_output)


def _row(
    outcomes: list[Outcome],
    passes: list[Repetition],
    plan: Plan,
    press: Load,
    workload: Source,
) -> Row:
    good = [outcome for outcome in outcomes if outcome.ok]
    counts, words = figures.failures(outcomes)
    output = figures.rate([one.output_tokens_per_s for one in passes])
    total = figures.rate([one.total_tokens_per_s for one in passes])
    lags = figures.distribution(outcome.lag_s for outcome in outcomes)
    share = figures.attained(outcomes, plan.target) if plan.target else None
    prices = [
        figures.cost_per_million(rate.mean, plan.gpu_hour, plan.n_gpus) if plan.gpu_hour else None
        for rate in (output, total)
    ]
    return Row(
        model="",
        workload=workload.about,
        load=Press(kind=press.kind, concurrency=press.concurrency, rate=press.rate),
        load_name=press.name,
        n_requests=len(outcomes),
        n_ok=len(good),
        failures=counts,
        failure_examples=words,
        n_short=sum(outcome.short for outcome in outcomes),
        requests_per_s=figures.rate([one.requests_per_s for one in passes]),
        output_tokens_per_s=output,
        total_tokens_per_s=total,
        ttft_s=figures.distribution(outcome.ttft_s for outcome in good),
        tpot_s=figures.distribution(o.tpot_s for o in good if o.tpot_s is not None),
        itl_s=figures.distribution(gap for outcome in good for gap in outcome.gaps_s),
        e2e_s=figures.distribution(outcome.e2e_s for outcome in good),
        lag_p99_s=lags.p99 if lags else None,
        attained=share,
        meets=None if share is None or not plan.target else share >= plan.target.share,
        cost_per_million_output=prices[0],
        cost_per_million_total=prices[1],
        repetitions=passes,
    )
