"""The engine's own counters: its Prometheus page, read before, during and after the measurement.

Names are those of vLLM's V1 engine (v1/metrics/loggers.py, v1/spec_decode/metrics.py) and of
llama.cpp's server (tools/server/README.md). Values are summed over labels, except shares.
"""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from quantkit.bench.connection import Address, Cut, get
from quantkit.bench.record import EngineMetrics

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+([-+\w.]+)")
INTERVAL_S = 0.5

KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "llamacpp:kv_cache_usage_ratio")
WAITING = ("vllm:num_requests_waiting", "llamacpp:requests_deferred")
PREFIX_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
PREFIX_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
PREEMPTIONS = ("vllm:num_preemptions_total",)
DRAFTS = ("vllm:spec_decode_num_drafts_total",)
DRAFTED = ("vllm:spec_decode_num_draft_tokens_total",)
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)


def parse(text: str) -> dict[str, float]:
    """Values by name, summed over labels; for shares the largest."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        matched = _LINE.match(line)
        if not matched:
            continue
        try:
            value = float(matched[2])
        except ValueError:
            continue
        if not math.isfinite(value):  # NaN: a mean over no events yet
            continue
        name, before = matched[1], found.get(matched[1], 0.0)
        found[name] = max(before, value) if name in KV_USE else before + value
    return found


def _value(page: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((page[name] for name in names if name in page), None)


class Watch:
    """The pages read so far."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._kv: list[float] = []
        self._waiting: list[float] = []

    def see(self, page: dict[str, float]) -> None:
        """Add a page."""
        self.first = self.first or page
        self.last = page
        for names, kept in ((KV_USE, self._kv), (WAITING, self._waiting)):
            value = _value(page, names)
            if value is not None:
                kept.append(value)

    def _grown(self, names: tuple[str, ...]) -> float | None:
        before, after = _value(self.first, names), _value(self.last, names)
        return None if before is None or after is None else after - before

    def _ratio(self, above: tuple[str, ...], below: tuple[str, ...]) -> float | None:
        part, whole = self._grown(above), self._grown(below)
        return part / whole if part is not None and whole else None

    def result(self) -> EngineMetrics | None:
        """The combined result; None if the engine has no such page."""
        if not self.first:
            return None
        per_draft = self._ratio(ACCEPTED, DRAFTS)
        return EngineMetrics(
            kv_cache_peak=max(self._kv, default=None),
            prefix_hit_rate=self._ratio(PREFIX_HITS, PREFIX_QUERIES),
            queue_peak=max(self._waiting, default=None),
            preemptions=self._grown(PREEMPTIONS),
            draft_acceptance=self._ratio(ACCEPTED, DRAFTED),
            tokens_per_step=None if per_draft is None else 1 + per_draft,
        )


@asynccontextmanager
async def watched(address: Address, api_key: str | None = None) -> AsyncIterator[Watch]:
    """Read the page at the start, at intervals, and at the end."""
    watch = Watch()

    async def look() -> bool:
        try:
            status, content = await get(address, "/metrics", api_key=api_key)
        except (OSError, TimeoutError, Cut):  # an unreadable page is skipped
            return False
        if status == 200:
            watch.see(parse(content.decode(errors="replace")))
        return status == 200

    async def keep_looking() -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await look()

    task = asyncio.ensure_future(keep_looking()) if await look() else None
    try:
        yield watch
    finally:
        if task is not None:
            task.cancel()
            await look()
