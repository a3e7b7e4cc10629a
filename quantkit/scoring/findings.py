"""Candidates' answers compared with their source's: paired, with p-values corrected."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantkit import metrics
from quantkit.errors import ScoreError
from quantkit.scoring.answers import LOSS, Answers, Outcome
from quantkit.scoring.paired import (
    AccuracyChange,
    PerplexityChange,
    compare_accuracies,
    compare_perplexity,
    holm,
)
from quantkit.scoring.verdict import verdict

ONE_SIDED = 1.645
"""Standard deviations above chance that guessing reaches in one case of twenty."""
KEY = ("task", "doc_id", "doc_hash")
"""What identifies a document."""
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Finding:
    """One score of one candidate, compared."""

    score: str
    """Such as `mmlu/acc` or `wikitext/perplexity`."""
    change: AccuracyChange | PerplexityChange
    adjusted_p: float
    """After Holm's correction over all candidates."""
    at_chance: bool = False
    """Whether the source is no better than guessing."""

    @property
    def words(self) -> str:
        """The finding in one sentence."""
        return verdict(self.change, self.adjusted_p)

    def to_json(self) -> dict[str, Any]:
        return {
            "score": self.score,
            **self.change.to_json(),
            "adjusted_p": self.adjusted_p,
            "source_at_chance": self.at_chance,
            "verdict": self.words,
        }


def compare(
    source: Sequence[Outcome],
    candidates: Mapping[str, Sequence[Outcome]],
    groups: Mapping[str, Sequence[str]],
) -> dict[str, list[Finding]]:
    """Findings for every candidate, per task and per group of tasks."""
    before = _by_metric(Answers.of(source))
    after = {name: Answers.of(outcomes) for name, outcomes in candidates.items()}
    found: dict[str, list[Finding]] = {name: [] for name in candidates}
    paired = {
        (name, metric): _paired(name, answers, after[name], metric)
        for metric, answers in before.items()
        if metric in _compared()
        for name in candidates
    }
    for score, metric, tasks in _scores(before, groups):
        if not tasks <= _comparable(before[metric], metric, paired):
            continue
        chosen = np.isin(before[metric].column("task"), sorted(tasks))
        values = [paired[name, metric] for name in candidates]
        changes = dict(zip(candidates, _changes(before[metric], values, chosen), strict=True))
        adjusted = holm([change.p_value for change in changes.values()])
        guessed = _at_chance(before[metric], chosen)
        for (name, change), p in zip(changes.items(), adjusted, strict=True):
            found[name].append(Finding(score, change, p, guessed))
    return found


def _compared() -> tuple[str, ...]:
    """Values of documents that are compared with the source's."""
    return (LOSS, *metrics.paired_by(metrics.LOSSES), *metrics.paired_by(metrics.ANSWERS))


def _comparable(before: Answers, metric: str, paired: Mapping[tuple[str, str], Floats]) -> set[str]:
    """Tasks whose values are what their metric's name says.

    Answers are right or wrong, while some tasks call a share of probability accuracy. A document's
    perplexity is logged as a log-likelihood, which is never positive.
    """
    tasks, values = before.column("task"), before.column("value")
    every = [values, *(found for (_, m), found in paired.items() if m == metric)]
    if metrics.of(metric).paired == metrics.ANSWERS:
        sound = np.all([(found == 0) | (found == 1) for found in every], axis=0)
    elif metrics.of(metric).paired == metrics.LOSSES:
        sound = np.all([found <= 0 for found in every], axis=0)
    else:
        sound = np.ones(len(tasks), bool)
    return set(tasks.tolist()) - set(tasks[~sound].tolist())


def _at_chance(answers: Answers, chosen: Mask) -> bool:
    """Whether this many right answers may well have come from guessing."""
    chance = answers.column("chance")[chosen]
    spread = math.sqrt(float((chance * (1 - chance)).sum()))
    right = float((answers.column("value")[chosen] - chance).sum())
    return bool(spread) and right < ONE_SIDED * spread


def _by_metric(answers: Answers) -> dict[str, Answers]:
    found = dict.fromkeys(answers.column("metric").tolist())
    return {metric: answers.of_metric(metric) for metric in found}


def _scores(
    before: Mapping[str, Answers], groups: Mapping[str, Sequence[str]]
) -> list[tuple[str, str, set[str]]]:
    """What can be compared: a name, a metric and the tasks whose documents count."""
    found = []
    grouped = {task for members in groups.values() for task in members}
    for metric in _compared():
        if metric not in before:
            continue
        tasks = list(dict.fromkeys(before[metric].column("task").tolist()))
        shown = metrics.PERPLEXITY if metric == LOSS else metric
        for group, members in groups.items():
            if inside := set(members) & set(tasks):
                found.append((f"{group}/{shown}", metric, inside))
        found += [(f"{task}/{shown}", metric, {task}) for task in tasks if task not in grouped]
    return found


def _paired(name: str, before: Answers, after: Answers, metric: str) -> Floats:
    """A candidate's values on the source's documents, in their order."""
    mine = after.of_metric(metric)
    if len(mine) == len(before) and all(
        np.array_equal(mine.column(key), before.column(key)) for key in KEY
    ):
        return mine.column("value")
    places = {key: i for i, key in enumerate(_keys(mine))}
    wanted = _keys(before)
    if missing := [key for key in wanted if key not in places]:
        raise ScoreError(
            f"{name} was asked other questions than the source ({missing[0][0]}); "
            "score both with the same settings and data"
        )
    return mine.column("value")[[places[key] for key in wanted]]


def _keys(answers: Answers) -> list[tuple[str, int, str]]:
    return list(zip(*(answers.column(name).tolist() for name in KEY), strict=True))


def _changes(
    before: Answers, after: Sequence[Floats], chosen: Mask
) -> Sequence[AccuracyChange | PerplexityChange]:
    first, others = before.column("value")[chosen], [values[chosen] for values in after]
    metric = before.column("metric")[0]
    if metric == LOSS or metrics.of(metric).paired == metrics.LOSSES:
        weights = before.column("weight")[chosen]
        sign = 1 if metric == LOSS else -1
        return [compare_perplexity(sign * first, sign * second, weights) for second in others]
    return compare_accuracies(first, others)
