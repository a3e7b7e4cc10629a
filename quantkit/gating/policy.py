"""A gate's policy: rules from YAML; all problems of a file are reported at once.

rules:
  - recipes: ["gptq-*"]
    class: 4-bit
    size: 4B-15B
    perplexity: {max_increase_pct: 2}
    mmlu: {max_drop: 1.0, confidence: 0.95}
evidence: {documents: 20, tokens: 5000, positions: 2000, questions: 200}
cannot_tell: ask
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from quantkit.errors import PolicyError
from quantkit.gating.classes import of_bits
from quantkit.gating.text import plain
from quantkit.report.evidence import Floor
from quantkit.specs import problems, read_yaml, shown

SHIPPED = Path(__file__).parent / "policies"

Class = Literal["8-bit", "4-bit", "below"]
Size = Literal["under-1B", "1B-4B", "4B-15B", "over-15B"]
Count = Annotated[int, Field(strict=True, ge=0)]
Bounded = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Growth = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
RELATIVE = ("max_increase_pct", "max_increase", "max_drop")
KINDS = ("max", "min", *RELATIVE)


@dataclass(frozen=True)
class Bound:
    """One limit of one metric."""

    kind: str
    """One of `KINDS`."""
    value: float
    confidence: float | None


class _Strict(BaseModel):
    model_config = ConfigDict(
        allow_inf_nan=False,
        frozen=True,
        extra="forbid",
        populate_by_name=True,
    )


class Limit(_Strict):
    """Allowed values or changes of one metric."""

    max: Bounded | None = None
    min: Bounded | None = None
    max_increase_pct: Growth | None = None
    """Percent of the value before."""
    max_increase: Growth | None = None
    """In the metric's own unit."""
    max_drop: Growth | None = None
    """In percentage points for shares such as an accuracy, otherwise in the metric's own unit."""
    confidence: Annotated[float, Field(strict=True, gt=0.5, lt=1)] | None = None
    """Judge by the whole interval at this confidence, not by the point estimate."""
    if_scored: Annotated[bool, Field(strict=True)] = False
    """Skip it, with a note, if not even the source has such a score."""

    @model_validator(mode="after")
    def _limits_something(self) -> "Limit":
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if not given:
            raise ValueError(f"no limit is given; choose from: {', '.join(KINDS)}")
        return self

    @property
    def bounds(self) -> Iterator[Bound]:
        for kind in KINDS:
            if (value := getattr(self, kind)) is not None:
                yield Bound(kind, value, self.confidence)


class Rule(_Strict):
    """Limits for some candidates. Every other key of its YAML is a metric's name."""

    recipes: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Patterns on the recipe's or the candidate's name."""
    bits: Class | None = Field(default=None, alias="class")
    """Only candidates with this many bits."""
    size: Size | None = None
    """Only if the source has this many weights."""
    limits: Annotated[dict[str, Limit], Field(min_length=1)]

    @field_validator("bits", mode="before")
    @classmethod
    def _name_class(cls, value: Any) -> Any:
        """Name the class of a number of bits: `3-bit` is `below`."""
        found = re.fullmatch(r"(\d{1,2})(?:[- ]?bits?)?", str(value))
        if found is None or value in get_args(Class):
            return value
        raise ValueError(
            f"must be {', '.join(get_args(Class)[:-1])} or {get_args(Class)[-1]}, not "
            f"{shown(value)}; {int(found[1])} bits are in the class {of_bits(int(found[1]))}"
        )

    @model_validator(mode="before")
    @classmethod
    def _split(cls, data: Any) -> Any:
        """Move metrics, which are beside a rule's own keys, below a key of their own."""
        if not isinstance(data, dict):
            raise ValueError("a rule is a list of `metric: {limit: number}` lines")
        words = ("recipes", "class", "size")
        limits = {key: value for key, value in data.items() if key not in words}
        wrong = []
        for key, value in limits.items():
            if isinstance(value, dict) and isinstance(key, str):
                continue
            near = difflib.get_close_matches(str(key), words, n=1)
            hint = f"did you mean {near[0]}?" if near else "a limit reads like {max: 0.05}"
            wrong.append(f"{plain(str(key))}: neither a metric with its limits nor a key; {hint}")
        if wrong:
            raise ValueError("; ".join(wrong))
        if not limits:
            raise ValueError("a rule needs a metric, such as perplexity: {max_increase_pct: 2}")
        return {**{key: data[key] for key in words if key in data}, "limits": limits}


class Evidence(_Strict):
    """The least evidence for a check; below it the answer is `cannot tell`."""

    documents: Count = 0
    """Per text."""
    tokens: Count = 0
    """For a perplexity."""
    positions: Count = 0
    """For a divergence from the source, or an agreement with it."""
    questions: Count = 0
    """For an accuracy."""

    @property
    def floor(self) -> Floor:
        return Floor(**self.model_dump())


class Policy(_Strict):
    """Everything that a report must satisfy."""

    rules: list[Rule] = []
    evidence: Evidence = Evidence()
    cannot_tell: Literal["fail", "warn", "ask"] = "fail"
    """If a change is shown to be neither within its limit nor beyond it."""
    missing: Literal["fail", "error"] = "fail"
    """If a candidate lacks a score that a rule names."""
    unjudged: Literal["error", "warn"] = "error"
    """If no rule judges a candidate."""
    against: list[Rule] = []
    """For a release against the previous one; limits apply to changes only."""

    @model_validator(mode="after")
    def _demands_something(self) -> "Policy":
        if not self.rules and not self.against:
            raise ValueError("a policy needs rules")
        for place, rule in enumerate(self.against, start=1):
            for metric, limit in rule.limits.items():
                fixed = [b.kind for b in limit.bounds if b.kind not in RELATIVE]
                if fixed:
                    raise ValueError(
                        f"against #{place}.{plain(metric)}: {fixed[0]} needs no earlier report; "
                        "put it into rules"
                    )
        return self


def load(path: Path) -> Policy:
    """A policy from its file."""
    return _validated(read_yaml(path, PolicyError), str(path))


def default(with_earlier: bool = False) -> Policy:
    """The policies that ship with quantkit, combined."""
    parts = [load(path) for path in sorted(SHIPPED.glob("*.yaml"))]
    against = [rule for part in parts for rule in part.against] if with_earlier else []
    rules = [rule for part in parts for rule in part.rules]
    return parts[0].model_copy(update={"rules": rules, "against": against})


def _validated(data: Any, where: str) -> Policy:
    if not isinstance(data, dict):
        raise PolicyError(f"{where} is not a policy: it has no `rules:`")
    try:
        return Policy.model_validate(data)
    except ValidationError as error:
        # To a rule, metrics are keys that may hold anything.
        lines = "\n".join(f"  {plain(line)}" for line in problems(error, Policy, ("limits",)))
        raise PolicyError(f"{where} is not a valid policy:\n{lines}") from error
