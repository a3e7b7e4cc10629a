"""Names of metrics in policies, and the figures of a report that they refer to."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from quantkit import metrics
from quantkit.errors import ScoreError
from quantkit.gating.text import plain
from quantkit.report import layers
from quantkit.report.document import Document, Entry
from quantkit.report.evidence import judged

ACCURACY = "accuracy"
SIZE = "size_ratio"
SIZES = (SIZE, "bits_per_weight", "size_bytes")
OUTLIER = "layer_outlier"
"""Error of the worst layer as a multiple of the median of its kind."""
CALIBRATION = "calibration_ratio"
"""Perplexity of the calibration tokens over that of the scored text: noise is far off."""


@dataclass(frozen=True)
class Figure:
    """One metric of a report."""

    asked: str
    """As the policy names it; the full name if that refers to several."""
    key: str
    """As the report names it: `<task>/<metric>`, or one of `SIZES`."""
    more_is_better: bool

    @property
    def metric(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def is_share(self) -> bool:
        return metrics.of(self.key).is_share

    @property
    def is_size(self) -> bool:
        return self.key in SIZES

    @property
    def is_scored(self) -> bool:
        """Whether it was measured on a task, not on files or layers."""
        return not self.is_size and self.key not in MADE

    @property
    def is_paired(self) -> bool:
        """Whether reports hold intervals of its change."""
        return bool(metrics.of(self.key).paired)

    def of(self, entry: Entry, document: Document) -> float | None:
        """The figure of one scored model; None if it has none."""
        if self.key in MADE:
            made = MADE[self.key](entry, document)
            if made is None:
                return None
            value = made
        elif self.key == SIZE:
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


def find(document: Document, asked: str) -> list[Figure]:
    """What a policy's name refers to in a report: nothing, one score, or one of every task."""
    if asked in SIZES:
        return [Figure(asked, asked, more_is_better=False)]
    if asked in MADE:
        known = any(MADE[asked](entry, document) is not None for entry in document.candidates)
        return [Figure(asked, asked, more_is_better=False)] if known else []
    entries, found = (document.baseline, *document.candidates), []
    keys = _meaning(document, asked, _keys(document))
    for key in keys:
        is_higher_better = next(
            entry.scores[key].higher_is_better for entry in entries if key in entry.scores
        )
        name = asked if len(keys) == 1 else key
        found.append(Figure(name, key, is_higher_better or metrics.of(key).more_is_better))
    return found


def known_names(document: Document) -> set[str]:
    """Every name that a policy may use for this report."""
    keys = _keys(document)
    named = {key.rpartition("/")[2] for key in keys}
    answered = metrics.paired_by(metrics.ANSWERS)
    tasks = {key.rpartition("/")[0] for key in keys if key.rpartition("/")[2] in answered}
    aliases = {ACCURACY} if tasks else set()
    return {*keys, *named, *tasks, *aliases, *SIZES, *MADE}


def _calibration_ratio(entry: Entry, document: Document) -> float | None:
    """None if unknown, or if no calibration data was used."""
    headline = document.baseline.scores.get(document.headline or "")
    if entry.made is None or headline is None or not _is_text(document.headline):
        return None
    found = entry.made.calibration_perplexity
    return found / headline.value if found is not None and headline.value > 0 else None


def _is_text(key: str | None) -> bool:
    return metrics.of(key or "").name == metrics.PERPLEXITY


def _layer_outlier(entry: Entry, document: Document) -> float | None:
    """None if it is unknown how a candidate was made."""
    if entry.made is None or not entry.made.layers:
        return None
    return max(layers.outliers(entry.made.layers).values(), default=1.0)


MADE = {CALIBRATION: _calibration_ratio, OUTLIER: _layer_outlier}
"""Figures about how a candidate was made."""


def _keys(document: Document) -> dict[str, None]:
    """Scores of the source and of all candidates."""
    entries = (document.baseline, *document.candidates)
    return {key: None for entry in entries for key in entry.scores}


def _meaning(document: Document, asked: str, keys: Collection[str]) -> list[str]:
    """Full names that a short one refers to.

    A metric's name refers to that metric of every requested task, so that no task is skipped for
    being the second. A task's or group's name refers to its accuracy.
    """
    if asked in keys:
        return [asked]
    tasks = document.baseline.settings.tasks
    answered = metrics.paired_by(metrics.ANSWERS)
    if asked in (metrics.PERPLEXITY, ACCURACY):
        wanted = answered if asked == ACCURACY else (metrics.PERPLEXITY,)
        every = (key for _, found in judged(tasks, document.groups, keys) for key in found)
        found = [key for key in every if key.rpartition("/")[2] in wanted]
        leading = [key for key in (document.accuracy, document.headline) if key in keys and key]
        found += [key for key in leading if key.rpartition("/")[2] in wanted]
    else:
        found = [f"{task}/{asked}" for task in tasks if f"{task}/{asked}" in keys]
    # If a report's tasks are groups or unknown: the first one.
    others = [key for key in keys if key.rpartition("/")[2] == asked]
    others += [f"{asked}/{metric}" for metric in answered if f"{asked}/{metric}" in keys]
    return list(dict.fromkeys(found)) or others[:1]
