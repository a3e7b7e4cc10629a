"""Measurements for other stages: one object per model and load."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.bench import engines, record


@dataclass(frozen=True)
class Measurement:
    """The measured speed of a model under one load."""

    model: str
    digest: str | None
    engine: str
    engine_version: str | None
    gpu: str | None
    """The first GPU's name; None on a CPU."""
    n_gpus: int
    sharing: tuple[int, int, bool] | None
    """How they share the model, see `engines.sharing`; None if unknown."""
    setting: dict[str, str]
    kind: str
    """`closed`, `poisson`, `constant`, `trace` or `batch`."""
    concurrency: int | None
    rate: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: float | None
    """Medians."""
    tpot_s: float | None
    e2e_s: float | None
    n_ok: int
    n_failed: int
    kv_tokens: int | None
    weight_bytes: int | None
    gpu_peak_bytes: int | None


def _sharing(shared: tuple[int, int, bool] | None, row: record.Row) -> tuple[int, int, bool] | None:
    """From the engine's own flags, or from those a sweep put in their place."""
    if shared is None or "tensor_parallel" not in row.setting:
        return shared
    return int(row.setting["tensor_parallel"]), shared[1], shared[2]


def measured(path: Path) -> tuple[Measurement, ...]:
    """The measurements in `bench.json`, or in a folder with one."""
    bench = record.read(path)
    given = bench.options.get("engine_arguments")
    shared = engines.sharing(list(map(str, given))) if isinstance(given, list) else None
    return tuple(
        Measurement(
            model=row.model,
            digest=row.digest,
            engine=bench.engine,
            engine_version=bench.engine_version,
            gpu=next(iter(bench.machine.gpus), None),
            n_gpus=max(bench.n_gpus, int(row.setting.get("tensor_parallel", "1"))),
            sharing=_sharing(shared, row) if bench.engine == "vllm" else None,
            setting=row.setting,
            kind=row.load.kind,
            concurrency=row.load.concurrency,
            rate=row.load.rate,
            prompt_tokens=row.workload.prompt_tokens,
            output_tokens=row.workload.output_tokens,
            output_tokens_per_s=row.output_tokens_per_s.mean,
            total_tokens_per_s=row.total_tokens_per_s.mean,
            ttft_s=row.ttft_s.p50 if row.ttft_s else None,
            tpot_s=row.tpot_s.p50 if row.tpot_s else None,
            e2e_s=row.e2e_s.p50 if row.e2e_s else None,
            n_ok=row.n_ok,
            n_failed=row.n_failed,
            kv_tokens=row.kv_tokens,
            weight_bytes=row.weight_bytes,
            gpu_peak_bytes=row.gpu_peak_bytes,
        )
        for row in bench.rows
    )
