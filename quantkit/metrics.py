"""Every metric that quantkit knows, one row each; scoring, reports, gates, cards and docs read it.

A score's name is `<task>/<metric>`. Metrics that are not here are lm-eval's own: they are shown
under their names, in the direction that lm-eval gives, and are not paired.
"""

from dataclasses import dataclass
from typing import Final, Literal

SHARE: Final = "share"
"""The unit of metrics between 0 and 1, which are shown in percent; changes are in points."""
ANSWERS: Final = "answers"
LOSSES: Final = "losses"
"""How a candidate's documents are held against the source's: right or wrong, or their losses."""


@dataclass(frozen=True)
class Metric:
    """What one metric means."""

    name: str
    """As lm-eval, score files and policies spell it."""
    label: str
    """In tables and on pages."""
    unit: Literal["", "share", "nats", "bits"] = ""
    more_is_better: bool = False
    counts: Literal["questions", "documents", "tokens", "positions"] = "documents"
    """What a score's `n` counts."""
    paired: Literal["", "answers", "losses"] = ""
    """By what a change against the source gets its interval; not at all where empty."""
    against_source: bool = False
    """Measures a distance from the source, so that the source itself has none."""
    detail: bool = False
    """Says once more what another metric says: only in files, and with `-v`."""
    rereads: str = ""
    """Another metric that reads the same answers, and speaks for both in verdicts."""
    quantile: float | None = None
    """Of the divergence over tokens."""
    hub: str = ""
    """The hub's name of it, for model cards; by default its own."""

    @property
    def is_share(self) -> bool:
        return self.unit == SHARE

    @property
    def is_per_token(self) -> bool:
        """Whether `n` counts tokens, so that its documents are counted elsewhere."""
        return self.counts in ("tokens", "positions")


PERPLEXITY = "perplexity"
"""Per token. Of a whole text it comes from the documents' losses; tasks that ask for one word, such
as LAMBADA, log it by document as the log-likelihood of that word."""
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
            "accuracy by length",
            SHARE,
            True,
            counts="questions",
            paired=ANSWERS,
            rereads=ACCURACY,
        ),
        Metric(EXACT_MATCH, "exact match", SHARE, True, counts="questions", paired=ANSWERS),
        *(
            Metric(name, label, SHARE, True, counts="questions", paired=ANSWERS)
            for name, label in (
                ("pass@1", "passed tests"),
                ("pass_at_1", "passed tests of one try"),
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
            "same first token",
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
    """The metric of a score `<task>/<metric>`, or by its own name."""
    name = key.rpartition("/")[2]
    return METRICS.get(name) or Metric(name, name)


def paired_by(how: str) -> tuple[str, ...]:
    """Metrics whose changes come from answers, or from losses."""
    return tuple(name for name, metric in METRICS.items() if metric.paired == how)


def distances() -> tuple[str, ...]:
    """Metrics that tables show of a candidate's distance from its source."""
    return tuple(n for n, m in METRICS.items() if m.against_source and not m.detail)


def quantiles() -> dict[str, float]:
    """Metrics that show how the divergence is spread over tokens."""
    return {n: m.quantile for n, m in METRICS.items() if m.quantile is not None}
