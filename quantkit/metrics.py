"""Every metric quantkit knows; read by scoring, reports, gates, cards and docs.

A score's name is `<task>/<metric>`. Metrics not listed here are lm-eval's own: they are shown under
their own names, in the direction lm-eval gives, and are not paired.
"""

from dataclasses import dataclass
from typing import Final, Literal

SHARE: Final = "share"
"""The unit of metrics between 0 and 1, shown in percent; changes are in percentage points."""
ANSWERS: Final = "answers"
LOSSES: Final = "losses"
"""How a candidate's documents are compared with the source's: by correctness, or by their losses.
"""


@dataclass(frozen=True)
class Metric:
    """Definition of one metric."""

    name: str
    """Spelling in lm-eval, score files and policies."""
    label: str
    """Label in tables and on pages."""
    unit: Literal["", "share", "nats", "bits"] = ""
    more_is_better: bool = False
    counts: Literal["questions", "documents", "tokens", "positions"] = "documents"
    """What a score's `n` counts."""
    paired: Literal["", "answers", "losses"] = ""
    """What the interval of a change against the source is computed from; empty: no interval."""
    against_source: bool = False
    """Measures a distance from the source, so the source itself has no value."""
    detail: bool = False
    """Repeats what another metric says: only in files, and with `-v`."""
    rereads: str = ""
    """Another metric that reads the same answers and stands for both where losses are listed."""
    quantile: float | None = None
    """Quantile of the divergence over tokens."""
    hub: str = ""
    """The hub's name for it in model cards; by default `name`."""

    @property
    def heading(self) -> str:
        """The label at the head of a column."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def is_share(self) -> bool:
        return self.unit == SHARE

    @property
    def is_per_token(self) -> bool:
        """Whether `n` counts tokens, so that documents are counted elsewhere."""
        return self.counts in ("tokens", "positions")


PERPLEXITY = "perplexity"
"""Per token. For a whole text it is computed from the documents' losses; tasks that ask for one
word, such as LAMBADA, log it per document as the log-likelihood of that word.
"""
ACCURACY = "acc"
EXACT_MATCH = "exact_match"
KL_MEAN = "kl_mean"
TOP1_AGREEMENT = "top1_agreement"
SAME_ANSWERS = "same_answers"
FIRST_DIFFERENCE = "first_difference"
METRICS = {
    metric.name: metric
    for metric in (
        Metric(PERPLEXITY, "perplexity", counts="tokens", paired=LOSSES),
        Metric(
            ACCURACY, "accuracy", SHARE, True, counts="questions", paired=ANSWERS, hub="accuracy"
        ),
        Metric(
            "acc_norm",
            "length-normalised accuracy",
            SHARE,
            True,
            counts="questions",
            paired=ANSWERS,
            rereads=ACCURACY,
        ),
        Metric(EXACT_MATCH, "exact match", SHARE, True, counts="questions", paired=ANSWERS),
        Metric(
            "math_verify",
            "equal answer",
            SHARE,
            True,
            counts="questions",
            paired=ANSWERS,
            rereads=EXACT_MATCH,
        ),
        *(
            Metric(name, label, SHARE, True, counts="questions", paired=ANSWERS)
            for name, label in (
                ("pass@1", "pass@1"),
                ("pass_at_1", "pass@1 (MBPP)"),
                ("prompt_level_strict_acc", "instructions followed"),
                ("regex_match", "pattern found"),
                ("valid_json", "valid JSON"),
                ("valid_tool_calls", "valid tool calls"),
            )
        ),
        Metric("word_perplexity", "perplexity per word"),
        Metric("byte_perplexity", "perplexity per byte", detail=True),
        Metric("bits_per_byte", "bits per byte", "bits", detail=True),
        Metric(KL_MEAN, "KL mean", "nats", counts="positions", against_source=True),
        *(
            Metric(
                name,
                label,
                "nats",
                counts="positions",
                against_source=True,
                detail=name != "kl_p99",
                quantile=quantile,
            )
            for name, label, quantile in (
                ("kl_median", "KL median", 0.5),
                ("kl_p75", "KL p75", 0.75),
                ("kl_p90", "KL p90", 0.9),
                ("kl_p95", "KL p95", 0.95),
                ("kl_p99", "KL p99", 0.99),
                ("kl_p999", "KL p99.9", 0.999),
            )
        ),
        Metric(
            TOP1_AGREEMENT,
            "top-1 agreement",
            SHARE,
            True,
            counts="positions",
            against_source=True,
        ),
        Metric(SAME_ANSWERS, "same answers", SHARE, True, against_source=True),
        Metric(
            FIRST_DIFFERENCE, "tokens until they differ", more_is_better=True, against_source=True
        ),
    )
}


def of(key: str) -> Metric:
    """The metric of a score `<task>/<metric>`, or of a bare metric name."""
    name = key.rpartition("/")[2]
    return METRICS.get(name) or Metric(name, name)


def decimals(key: str) -> int:
    """Decimals of a value, the same everywhere; those of a share are of its percentage."""
    metric = of(key)
    if metric.is_share or metric.name == FIRST_DIFFERENCE:
        return 1
    return 4 if metric.unit else 3


def shown(key: str, value: float) -> str:
    """A value in its metric's unit, rounded the same way everywhere: `68.3%`, `19.004`."""
    if of(key).is_share:
        return f"{100 * value:.{decimals(key)}f}%"
    return f"{value:.{decimals(key)}f}"


def points(difference: float) -> str:
    """A signed difference of shares in points, rounded the same way everywhere: `-0.8`."""
    return f"{free_of_noise(100 * difference):+.1f}"


def change(key: str, before: float, after: float) -> str:
    """A change against the source: shares in points, others in percent; empty against zero."""
    if of(key).is_share:
        return f"{points(after - before)} points"
    return f"{after / before - 1:+.2%}" if before else ""


def free_of_noise(value: float) -> float:
    """Without the last bits: 100 * (0.6925 - 0.7) is -0.75, and must round as that does."""
    return round(value, 9) + 0.0


def paired_by(how: str) -> tuple[str, ...]:
    """Metrics whose changes are paired by answers, or by losses."""
    return tuple(name for name, metric in METRICS.items() if metric.paired == how)


def distances() -> tuple[str, ...]:
    """Metrics of a candidate's distance from its source that tables show."""
    return tuple(n for n, m in METRICS.items() if m.against_source and not m.detail)


def quantiles() -> dict[str, float]:
    """Metrics for quantiles of the divergence over tokens."""
    return {n: m.quantile for n, m in METRICS.items() if m.quantile is not None}
