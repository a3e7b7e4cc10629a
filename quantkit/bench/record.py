"""`bench.json`: what was measured, on what, and how. Later versions add keys and change none.

Times are in seconds, sizes in bytes, rates per second; nothing is rounded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

# Checked, since others may have changed the file; whoever opens it has pydantic loaded anyway.
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.errors import ScoreError
from quantkit.parsing import parse_json
from quantkit.specs import as_record, json_problem

VERSION = 1
KIND = "quantkit-bench"
FILE = "bench.json"


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Distribution(Record):
    """Of a latency, over all requests that were answered."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Rate(Record):
    """Something a second: the mean of all repetitions, and the slowest and fastest of them."""

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
    """What the engine counted itself while it was measured; None where it does not say."""

    kv_cache_peak: float | None = None
    """The largest share of the KV cache in use."""
    prefix_hit_rate: float | None = None
    """Of all prompt tokens looked up in the prefix cache."""
    queue_peak: float | None = None
    """Requests waiting at the worst moment."""
    preemptions: float | None = None
    draft_acceptance: float | None = None
    """Accepted over drafted tokens."""
    tokens_per_step: float | None = None
    """Tokens that a step of speculative decoding yields, its own included."""


class Workload(Record):
    """What was asked."""

    name: str
    """`fixed`, or the name of a trace or calibration set."""
    prompt_tokens: int | None = None
    """Of each request; None where they differ."""
    output_tokens: int | None = None
    shared_prefix: int = 0
    """Tokens that all prompts begin with."""


class Press(Record):
    """How requests came."""

    kind: Literal["closed", "poisson", "constant", "trace", "batch"]
    concurrency: int | None = None
    rate: float | None = None


class Row(Record):
    """A model with a setting, a workload and a load."""

    model: str
    digest: str | None = None
    """Of a checkpoint of ours, by which a report knows it."""
    setting: dict[str, str] = {}
    """Serving flags; what is not named is the engine's default."""
    workload: Workload
    load: Press
    load_name: str
    n_requests: int
    n_ok: int
    failures: dict[str, int] = {}
    """Requests without a full answer, by kind. They are in no latency and no throughput."""
    failure_examples: dict[str, str] = {}
    n_short: int = 0
    """Answers that ended before the length that was asked for."""
    requests_per_s: Rate
    output_tokens_per_s: Rate
    total_tokens_per_s: Rate
    ttft_s: Distribution | None = None
    """Time to first token."""
    tpot_s: Distribution | None = None
    """Time per output token after the first."""
    itl_s: Distribution | None = None
    """Time between pieces of a stream."""
    e2e_s: Distribution | None = None
    lag_p99_s: float | None = None
    """How late the client sent what was due."""
    attained: float | None = None
    """The share of all requests that met the target; failed ones did not."""
    meets: bool | None = None
    cost_per_million_output: float | None = None
    cost_per_million_total: float | None = None
    cold_start_s: float | None = None
    """From starting the engine to its being healthy."""
    gpu_peak_bytes: int | None = None
    """Of all GPUs in use together, less what was taken before the engine started."""
    weight_bytes: int | None = None
    """As the engine says."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds."""
    metrics: EngineMetrics | None = None
    repetitions: list[Repetition] = []

    @property
    def n_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def setting_name(self) -> str:
        """In a few words."""
        return " ".join(f"{name}={value}" for name, value in self.setting.items()) or "default"


class Refusal(Record):
    """A model with a setting that the engine would not serve."""

    model: str
    setting: dict[str, str] = {}
    reason: str

    @property
    def brief(self) -> str:
        """The reason in a line: what happened, and the thing that the engine said of it."""
        first, *rest = self.reason.splitlines()
        telling = rest[:1] if [line.strip() for line in rest[1:2]] == ["..."] else rest[-1:]
        last = "".join(f" {line.strip()}" for line in telling)
        return first.removesuffix(" Its last lines:") + last


class Machine(Record):
    """What it was measured on."""

    processor: str
    n_cpus: int
    gpus: list[str] = []
    client_only: bool = False
    """The server ran elsewhere, on hardware that nobody told of; this is the client's machine."""

    @property
    def name(self) -> str:
        """Of what served, in a few words."""
        if self.client_only:
            return "unknown hardware"
        kinds = {gpu: self.gpus.count(gpu) for gpu in self.gpus}
        shown = [f"{n} x {gpu}" if n > 1 else gpu for gpu, n in kinds.items()]
        return ", ".join(shown) or f"{self.n_cpus} CPU cores ({self.processor})"


class Target(Record):
    """What users can bear."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = 0.99
    """Of all requests that must meet it."""


class Choice(Record):
    """The setting to serve a model with, and why; or why none."""

    model: str
    setting: dict[str, str] | None
    workload: str | None = None
    """For which of several it is."""
    load: str | None = None
    output_tokens_per_s: float | None = None
    reason: str


class Comparison(Record):
    """A model against the first one, request by request, in one metric of time."""

    model: str
    against: str
    setting: dict[str, str] = {}
    load: str
    metric: str
    n_pairs: int
    """Requests that both answered."""
    ratio: float | None = None
    """The model's time over the other's: below 1 it is faster; None where too few were asked."""
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
    """Seed, warm-up, repetitions, time-out, further flags."""
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
        """Rows of a model: by its digest where both have one, else by its name."""
        for row in self.rows:
            if row.digest == digest if row.digest and digest else row.model == model:
                yield row


def is_bench(path: Path) -> bool:
    """Whether a file is one of ours, by its first words."""
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
