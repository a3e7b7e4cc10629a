"""Intervals of a change, from a report's paired comparisons, and of a single figure."""

from quantkit import metrics
from quantkit.report.document import Comparison, Entry
from quantkit.scoring import bounds
from quantkit.scoring.bounds import Interval, documents_of


def of_change(comparison: Comparison, confidence: float, times: float = 1.0) -> Interval | None:
    """The interval of a difference of accuracies or a ratio of perplexities.

    Extrapolated to `times` as many questions. None if the report has none of this confidence, or an
    invalid one.
    """
    if comparison.n_questions is not None:
        if comparison.gained is None or comparison.lost is None:
            return None
        counts = (comparison.gained, comparison.lost, comparison.n_questions)
        return bounds.of_difference(*counts, confidence, times)
    ratio, low, high = comparison.ratio, comparison.low, comparison.high
    if ratio is None or low is None or high is None:
        return None
    kept, n = comparison.intervals, comparison.n_documents
    return bounds.of_ratio(ratio, (low, high), kept, n, confidence, times)


def of_figure(entry: Entry, key: str, confidence: float, times: float = 1.0) -> Interval | None:
    """The interval of a score from its own standard error; None if it has none."""
    if (score := entry.scores.get(key)) is None:
        return None
    return bounds.of_value(score, n_documents(entry, key), confidence, times)


def n_documents(entry: Entry, key: str) -> int | None:
    """Number of documents of a score: from the text's paired comparison, or from its scores."""
    text = entry.comparison(f"{key.rpartition('/')[0]}/{metrics.PERPLEXITY}")
    if text is not None and text.n_documents is not None:
        return text.n_documents
    return documents_of(entry.scores, key)


def n_of(comparison: Comparison) -> int | None:
    """Questions or documents that were compared."""
    return comparison.n_questions or comparison.n_documents
