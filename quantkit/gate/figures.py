"""The names that a policy gives to metrics, and the figures that a report holds under them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.errors import ScoreError
from quantkit.gate.text import plain
from quantkit.report import layers
from quantkit.report.document import Document, Entry
from quantkit.score.findings import ACCURACIES

PERPLEXITY = "perplexity"
ACCURACY = "accuracy"
SIZES = ("size_ratio", "bits_per_weight", "size_bytes")
OUTLIER = "layer_outlier"
"""How many times as far off the worst layer is as the median of its kind."""
CALIBRATION = "calibration_ratio"
"""Perplexity of the calibration tokens over that of the text that is scored: noise is far off."""
SHARES = (*ACCURACIES, "top1_agreement")
"""Metrics between 0 and 1, of which more is better and drops are told in points."""


@dataclass(frozen=True)
class Figure:
    """One metric of a report."""

    asked: str
    """As the policy names it."""
    key: str
    """As the report does: `<task>/<metric>`, or one of `SIZES`."""
    more_is_better: bool

    @property
    def metric(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def is_share(self) -> bool:
        return self.metric in SHARES

    @property
    def is_size(self) -> bool:
        return self.key in SIZES

    @property
    def is_paired(self) -> bool:
        """Whether reports hold intervals of its change."""
        return self.metric in (*ACCURACIES, PERPLEXITY)

    def of(self, entry: Entry, document: Document) -> float | None:
        """The figure of one scored model, None where it has none."""
        if self.key in MADE:
            made = MADE[self.key](entry, document)
            if made is None:
                return None
            value = made
        elif self.key == "size_ratio":
            value = entry.size_bytes / document.baseline.size_bytes
        elif self.is_size:
            value = float(getattr(entry, self.key))
        elif self.key in entry.scores:
            value = entry.scores[self.key].value
        else:
            return None
        if not math.isfinite(value):
            raise ScoreError(f"{plain(self.key)} of {plain(entry.name)} is {value}; score it again")
        return value


def find(document: Document, asked: str) -> Figure | None:
    """What a policy's name stands for in a report, None where it stands for nothing."""
    if asked in SIZES:
        return Figure(asked, asked, more_is_better=False)
    if asked in MADE:
        known = any(MADE[asked](entry, document) is not None for entry in document.candidates)
        return Figure(asked, asked, more_is_better=False) if known else None
    keys = _keys(document)
    key = next((key for key in _meanings(document, asked) if key in keys), None)
    if key is None:
        return None
    entries = (document.baseline, *document.candidates)
    told = next(entry.scores[key].higher_is_better for entry in entries if key in entry.scores)
    return Figure(asked, key, told or key.rpartition("/")[2] in SHARES)


def known(document: Document) -> set[str]:
    """Every name that a policy may give for this report."""
    keys = _keys(document)
    metrics = {key.rpartition("/")[2] for key in keys}
    tasks = {key.rpartition("/")[0] for key in keys if key.rpartition("/")[2] in ACCURACIES}
    aliases = {ACCURACY} if tasks else set()
    return {*keys, *metrics, *tasks, *aliases, *SIZES, *MADE}


def _calibration_ratio(entry: Entry, document: Document) -> float | None:
    """None where it is not known, and where nothing was learnt from data."""
    headline = document.baseline.scores.get(document.headline or "")
    if entry.made is None or headline is None or not (document.headline or "").endswith(PERPLEXITY):
        return None
    found = entry.made.calibration_perplexity
    return found / headline.value if found is not None and headline.value > 0 else None


def _layer_outlier(entry: Entry, document: Document) -> float | None:
    """None where it is not known how a candidate was made."""
    if entry.made is None or not entry.made.layers:
        return None
    return max(layers.outliers(entry.made.layers).values(), default=1.0)


MADE = {CALIBRATION: _calibration_ratio, OUTLIER: _layer_outlier}
"""Figures of how a candidate was made."""


def _keys(document: Document) -> dict[str, None]:
    """Scores of the source and of all candidates."""
    entries = (document.baseline, *document.candidates)
    return {key: None for entry in entries for key in entry.scores}


def _meanings(document: Document, asked: str) -> Iterator[str]:
    """Full names that a short one may stand for, the first that exists counts."""
    yield asked
    tasks = list(document.baseline.settings.tasks)
    headline = document.headline or ""
    if asked == ACCURACY:
        if document.accuracy:
            yield document.accuracy
        if headline.endswith("/acc"):
            yield headline
        yield from (f"{task}/{metric}" for task in tasks for metric in ACCURACIES)
    if asked == PERPLEXITY and headline.endswith(f"/{PERPLEXITY}"):
        yield headline
    # Of several texts the one whose perplexity leads the report.
    leading = headline or next((k for k in _keys(document) if k.endswith(f"/{PERPLEXITY}")), "")
    yield f"{leading.rpartition('/')[0]}/{asked}"
    yield from (key for key in _keys(document) if key.rpartition("/")[2] == asked)
    yield from (f"{asked}/{metric}" for metric in ACCURACIES)
