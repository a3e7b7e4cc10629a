"""`bench.json`: what was measured, on what, and how. Later versions add keys and change none.

Times are in seconds, sizes in bytes, rates per second; nothing is rounded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

# Validated, since others may have changed the file; whoever opens it has pydantic loaded anyway.
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.errors import ScoreError
from quantkit.hardware.gpus import label
from quantkit.parsing import parse_json
from quantkit.specs import as_record, json_problem

VERSION = 1
KIND = "quantkit-bench"
FILE = "bench.json"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Distribution(Record):
    """Distribution of a latency over all answered requests."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Rate(Record):
    """A rate per second: mean, slowest and fastest repetition."""

    mean: float
    low: float
    high: float


class Repetition(Record):
    """One pass over a workload."""

    seconds: float
    """From the first request being due to the last answer."""
    n_ok: int
    n_failed: int
    prompt_tokens: int
    output_tokens: int

    @property
    def requests_per_s(self) -> float:
        return self.n_ok / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


class EngineMetrics(Record):
    """The engine's own counters during the measurement; None if it does not report them."""

    kv_cache_peak: float | None = None
    """Peak share of the KV cache in use."""
    prefix_hit_rate: float | None = None
    """Share of prompt tokens found in the prefix cache."""
    queue_peak: float | None = None
    """Most requests waiting at any time."""
    preemptions: float | None = None
    draft_acceptance: float | None = None
    """Accepted over drafted tokens."""
    tokens_per_step: float | None = None
    """Tokens per step of speculative decoding, the target's own included."""


class Workload(Record):
    """What was requested."""

    name: str
    """`fixed`, or the name of a trace or calibration set."""
    prompt_tokens: int | None = None
    """Per request; None if they differ."""
    output_tokens: int | None = None
    shared_prefix: int = 0
    """Length of the prefix that all prompts share, in tokens."""


class Press(Record):
    """How requests arrived."""

    kind: Literal["closed", "poisson", "constant", "trace", "batch"]
    concurrency: int | None = None
    rate: float | None = None


class Row(Record):
    """One combination of model, setting, workload and load."""

    model: str
    digest: str | None = None
    """Digest of a quantkit checkpoint, by which a report identifies it."""
    setting: dict[str, str] = {}
    """Serving flags; flags not listed have the engine's default."""
    workload: Workload
    load: Press
    load_name: str
    n_requests: int
    n_ok: int
    failures: dict[str, int] = {}
    """Requests without a full answer, by kind. Latencies and throughput exclude them."""
    failure_examples: dict[str, str] = {}
    n_short: int = 0
    """Answers that ended before the requested length."""
    requests_per_s: Rate
    output_tokens_per_s: Rate
    total_tokens_per_s: Rate
    ttft_s: Distribution | None = None
    """Time to first token."""
    tpot_s: Distribution | None = None
    """Time per output token after the first."""
    itl_s: Distribution | None = None
    """Time between chunks of a stream."""
    e2e_s: Distribution | None = None
    lag_p99_s: float | None = None
    """How late the client sent requests, 99th percentile."""
    attained: float | None = None
    """Share of all requests that met the target; failed ones did not."""
    meets: bool | None = None
    cost_per_million_output: float | None = None
    cost_per_million_total: float | None = None
    cold_start_s: float | None = None
    """From starting the engine until it is healthy."""
    gpu_peak_bytes: int | None = None
    """All GPUs in use together, minus what was in use before the engine started."""
    weight_bytes: int | None = None
    """As reported by the engine."""
    kv_tokens: int | None = None
    """Capacity of the KV cache in tokens."""
    metrics: EngineMetrics | None = None
    repetitions: list[Repetition] = []

    @property
    def n_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def setting_name(self) -> str:
        """A short name."""
        return " ".join(f"{name}={value}" for name, value in self.setting.items()) or "default"


class Refusal(Record):
    """A model with a setting that the engine refused to serve."""

    model: str
    setting: dict[str, str] = {}
    reason: str

    @property
    def brief(self) -> str:
        """The reason in one line: what happened, and the engine's own message."""
        first, *rest = self.reason.splitlines()
        telling = rest[:1] if [line.strip() for line in rest[1:2]] == ["..."] else rest[-1:]
        last = "".join(f" {line.strip()}" for line in telling)
        return first.removesuffix(" Its last lines:") + last


class Machine(Record):
    """The machine that was measured."""

    processor: str
    n_cpus: int
    gpus: list[str] = []
    client_only: bool = False
    """The server ran elsewhere, on unknown hardware; this is the client's machine."""

    @property
    def name(self) -> str:
        """Short name of the serving hardware."""
        if self.client_only:
            return "unknown hardware"
        kinds = {label(gpu): self.gpus.count(gpu) for gpu in self.gpus}
        shown = [f"{n} x {gpu}" if n > 1 else gpu for gpu, n in kinds.items()]
        return ", ".join(shown) or f"{self.n_cpus} CPU cores ({self.processor})"


class Target(Record):
    """A latency target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = 0.99
    """Share of requests that must meet it."""


class Choice(Record):
    """The setting to serve a model with and why, or why there is none."""

    model: str
    setting: dict[str, str] | None
    workload: str | None = None
    """The workload it is for, if there are several."""
    load: str | None = None
    output_tokens_per_s: float | None = None
    reason: str


class Comparison(Record):
    """A model against the first one, request by request, in one latency metric."""

    model: str
    against: str
    setting: dict[str, str] = {}
    load: str
    metric: str
    n_pairs: int
    """Requests that both answered."""
    ratio: float | None = None
    """The model's time over the other's: below 1 it is faster; None with too few requests."""
    low: float | None = None
    """Ends of the 95% interval."""
    high: float | None = None
    verdict: str


class Bench(Record):
    """A whole run."""

    kind: Literal["quantkit-bench"] = "quantkit-bench"
    version: Literal[1] = Field(default=1, alias="schema")
    engine: str
    """`vllm`, `llama.cpp` or `server`."""
    engine_version: str | None = None
    machine: Machine
    versions: dict[str, str]
    created: str
    options: dict[str, Any] = {}
    """Seed, warm-up, repetitions, timeout, further flags."""
    gpu_hour: float | None = None
    n_gpus: int = 1
    target: Target | None = None
    rows: list[Row]
    refusals: list[Refusal] = []
    choices: list[Choice] = []
    comparisons: list[Comparison] = []
    notes: list[str] = []

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def of(self, model: str, digest: str | None = None) -> Iterator[Row]:
        """Rows of a model: by digest if both have one, else by name."""
        for row in self.rows:
            if row.digest == digest if row.digest and digest else row.model == model:
                yield row


def is_bench(path: Path) -> bool:
    """Whether a file is a `bench.json`, judged by its beginning."""
    try:
        data = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND


def read(path: Path) -> Bench:
    """Measurements from `bench.json` or the folder that holds it."""
    path = path / FILE if path.is_dir() else path
    try:
        data = parse_json(path.read_bytes())
    except OSError as error:
        raise ScoreError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ScoreError(f"{path} is not valid JSON: {error}; give a bench.json") from error
    version = data.get("schema") if isinstance(data, dict) else None
    if isinstance(version, int) and version > VERSION and data.get("kind") == KIND:
        raise ScoreError(f"{path} has schema {version}, of a newer quantkit; upgrade quantkit")
    try:
        return as_record(Bench, data)
    except ValidationError as error:
        first = json_problem(error, Bench)
        raise ScoreError(f"{path} is not a bench.json: {first}") from error


def schema() -> dict[str, Any]:
    """The JSON schema of the file."""
    from quantkit.schema import of

    return of(Bench)
