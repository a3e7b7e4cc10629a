"""What candidates' answers say against their source's: paired, and corrected for many of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import ScoreError
from quantkit.score.answers import LOSS, Outcome
from quantkit.score.paired import (
    AccuracyChange,
    PerplexityChange,
    compare_accuracy,
    compare_perplexity,
    holm,
)
from quantkit.score.verdict import verdict

ONE_SIDED = 1.645
"""Standard deviations above chance that guessing reaches in one case of twenty."""
ACCURACIES = ("acc", "acc_norm", "exact_match")
Key = tuple[str, int, str]
"""Task, document and its hash."""


@dataclass(frozen=True)
class Finding:
    """One score of one candidate, compared."""

    score: str
    """Such as `mmlu/acc` or `wikitext/perplexity`."""
    change: AccuracyChange | PerplexityChange
    adjusted_p: float
    """After Holm's correction over all candidates."""
    at_chance: bool = False
    """Whether the source does no better than guessing."""

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
    """Findings of every candidate, task by task and for every group of tasks."""
    before = _by_metric(source)
    after = {name: _by_metric(outcomes) for name, outcomes in candidates.items()}
    found: dict[str, list[Finding]] = {name: [] for name in candidates}
    for score, metric, tasks in _scores(before, groups):
        changes = {
            name: _change(name, metric, before[metric], after[name].get(metric, {}), tasks)
            for name in candidates
        }
        adjusted = holm([change.p_value for change in changes.values()])
        guessed = _at_chance([o for key, o in before[metric].items() if key[0] in tasks])
        for (name, change), p in zip(changes.items(), adjusted, strict=True):
            found[name].append(Finding(score, change, p, guessed))
    return found


def _at_chance(outcomes: Sequence[Outcome]) -> bool:
    """Whether so many right answers may well have come from guessing."""
    spread = math.sqrt(sum(o.chance * (1 - o.chance) for o in outcomes))
    right = sum(o.value - o.chance for o in outcomes)
    return bool(spread) and right < ONE_SIDED * spread


def _by_metric(outcomes: Sequence[Outcome]) -> dict[str, dict[Key, Outcome]]:
    found: dict[str, dict[Key, Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.task, outcome.doc_id, outcome.doc_hash)
        found.setdefault(outcome.metric, {})[key] = outcome
    return found


def _scores(
    before: Mapping[str, Mapping[Key, Outcome]], groups: Mapping[str, Sequence[str]]
) -> list[tuple[str, str, set[str]]]:
    """What can be compared: a name, a metric and the tasks whose documents count."""
    found = []
    grouped = {task for members in groups.values() for task in members}
    for metric in (LOSS, *ACCURACIES):
        tasks = list(dict.fromkeys(key[0] for key in before.get(metric, {})))
        shown = "perplexity" if metric == LOSS else metric
        for group, members in groups.items():
            if inside := set(members) & set(tasks):
                found.append((f"{group}/{shown}", metric, inside))
        found += [(f"{task}/{shown}", metric, {task}) for task in tasks if task not in grouped]
    return found


def _change(
    name: str,
    metric: str,
    before: Mapping[Key, Outcome],
    after: Mapping[Key, Outcome],
    tasks: set[str],
) -> AccuracyChange | PerplexityChange:
    keys = [key for key in before if key[0] in tasks]
    if any(key not in after for key in keys):
        raise ScoreError(
            f"{name} was asked other questions than the source ({', '.join(sorted(tasks)[:3])}); "
            "score both with the same settings and data"
        )
    first = [before[key].value for key in keys]
    second = [after[key].value for key in keys]
    if metric == LOSS:
        return compare_perplexity(first, second, [before[key].weight for key in keys])
    return compare_accuracy(first, second)
