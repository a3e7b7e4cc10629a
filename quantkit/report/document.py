"""The report as a file: what programs read, with a published schema.

Versions only add keys: version 1 had none of those that have a default here.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.errors import ScoreError
from quantkit.export.verified import Verified
from quantkit.parsing import parse_json
from quantkit.scoring.scorecard import Provenance, Score, Settings
from quantkit.specs import PlainName, as_record, json_problem

VERSION = 2


class Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        populate_by_name=True,
    )


class Comparison(Record):
    """One score of a candidate against the source's, from individual answers."""

    score: str
    """Such as `mmlu/acc` or `wikitext/perplexity`."""
    n_questions: int | None = None
    """For an accuracy ..."""
    gained: int | None = None
    """... those that only the candidate gets right ..."""
    lost: int | None = None
    """... and those that only the source gets right."""
    difference: float | None = None
    """Candidate minus source, as a fraction of all questions."""
    n_documents: int | None = None
    """For a perplexity ..."""
    n_tokens: int | None = None
    ratio: float | None = None
    """... candidate over source."""
    low: float | None
    """The 95% interval of the difference or ratio; None with too few documents."""
    high: float | None
    intervals: dict[str, list[float]] = {}
    """For a ratio: low and high by confidence, such as `0.99`."""
    p_value: float
    adjusted_p: float
    """After Holm's correction over all candidates: for significance, not for limits."""
    source_at_chance: bool = False
    """The source is no better than guessing."""
    verdict: str


class Entry(Record):
    """One scored model."""

    name: PlainName
    recipe: str | None
    """None for the source."""
    format: str
    digest: str
    """Digest of the scored files; a report is matched by it, not by its location."""
    size_bytes: int
    """Size of all tensors: what a GPU has to hold."""
    size_ratio: float | None = None
    """Relative to the source's size."""
    bits_per_weight: float
    scores: dict[str, Score]
    """By `<task>/<metric>`."""
    settings: Settings
    device: str
    created: str
    made: Provenance | None = None
    verified: Verified | None = None
    """How a serving engine handled it, where that was tried."""
    comparisons: list[Comparison] = []
    pareto: bool = False
    """No other candidate is both smaller and better."""
    gpus: str | None = None
    """Which GPUs run it natively."""

    def comparison(self, score: str) -> Comparison | None:
        """The paired comparison of one score, where there is one."""
        return next((c for c in self.comparisons if c.score == score), None)


class Speed(Record):
    """How fast one of the models served, as measured by `quantkit bench`; medians and tails."""

    model: str
    """The name of the source or a candidate."""
    engine: str
    engine_version: str | None = None
    hardware: str
    """GPUs, or the processor where there were none."""
    setting: dict[str, str] = {}
    """Serving flags; others have the engine's defaults."""
    load: str
    """Users or requests per second."""
    workload: str
    """Tokens of prompts and answers, or what was replayed."""
    n_requests: int
    n_failed: int
    """Not included in the figures below."""
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float | None = None
    """Time to first token, from when the request was due."""
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    """Time per output token after the first."""
    tpot_p99_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p99_s: float | None = None
    cold_start_s: float | None = None
    gpu_peak_bytes: int | None = None
    kv_tokens: int | None = None
    """Capacity of the KV cache in tokens."""
    cost_per_million_output: float | None = None


class Recommendation(Record):
    """The candidate to take, and why; or why none."""

    name: str | None
    reason: str
    not_judged: list[str] = []
    """Scores and tasks that the choice does not cover, each with the reason."""


class Document(Record):
    """A source and its candidates, best first."""

    version: Literal[1, 2] = Field(default=2, alias="schema")
    headline: str | None = None
    """The score that candidates are ordered by."""
    accuracy: str | None = None
    """The accuracy shown next to it."""
    baseline: Entry
    groups: dict[str, list[str]] = {}
    """Groups of tasks and their tasks."""
    candidates: list[Entry]
    recommended: Recommendation | None = None
    notes: list[str] = []
    """Notes for readers."""
    speed: list[Speed] = []
    """Speeds of those models that were measured."""

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)


def read(path: Path) -> Document:
    """A report from its file, of this version or an older one."""
    try:
        data = parse_json(path.read_bytes())
    except OSError as error:
        hint = "; `quantkit compare` and `quantkit report` write reports"
        hint = hint if isinstance(error, FileNotFoundError) else ""
        raise ScoreError(f"cannot read {path}: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise ScoreError(f"{path} is not valid JSON: {error}; give a report.json") from error
    version = data.get("schema") if isinstance(data, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ScoreError(f"{path} has schema {version}, of a newer quantkit; upgrade quantkit")
    try:
        return as_record(Document, data)
    except ValidationError as error:
        first = json_problem(error, Document)
        raise ScoreError(f"{path} is not a report: {first}") from error


def schema() -> dict[str, Any]:
    """The JSON schema of a report's file."""
    from quantkit.schema import of

    return of(Document)
