"""Splits scores by task, and merges them as if they came from one run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.scorecard import Score


def only(evaluation: Evaluation, task: str) -> Evaluation:
    """The part of an evaluation that belongs to one task."""
    card = evaluation.card
    settings = card.settings.model_copy(
        update={
            "tasks": {task: card.settings.tasks.get(task, "")},
            "data": None
            if card.settings.data is None
            else {k: v for k, v in card.settings.data.items() if k == task},
        }
    )
    scores = {key: score for key, score in card.scores.items() if _task_of(key) == task}
    return Evaluation(
        card.model_copy(update={"scores": scores, "settings": settings, "groups": {}}),
        [outcome for outcome in evaluation.outcomes if outcome.task == task],
    )


def merged(
    parts: Sequence[Evaluation],
    tasks: Sequence[str],
    groups: Mapping[str, Mapping[str, Any]],
    name: str = "",
) -> Evaluation:
    """One evaluation of all tasks, with group scores aggregated as in lm-eval."""
    cards = [part.card for part in parts]
    scores = {key: score for card in cards for key, score in card.scores.items()}
    inside = {group: _leaves(group, groups) for group in groups}
    for group, facts in groups.items():
        for asked in facts["metrics"]:
            if (found := _added_up(asked, inside[group], scores)) is not None:
                scores[f"{group}/{asked['metric']}"] = found
    own = {task: v for card in cards for task, v in card.settings.tasks.items()}
    settings = cards[0].settings.model_copy(
        update={
            "tasks": {t: groups[t]["version"] if t in groups else own.get(t, "") for t in tasks},
            "data": {k: v for card in cards for k, v in (card.settings.data or {}).items()},
        }
    )
    card = cards[0].model_copy(
        update={
            **({"name": name} if name else {}),
            "scores": scores,
            "settings": settings,
            "groups": {g: inside[g] for g, facts in groups.items() if not facts["is_tag"]},
            "seconds": sum(card.seconds for card in cards),
            "created": max(card.created for card in cards),
        }
    )
    return Evaluation(card, [outcome for part in parts for outcome in part.outcomes])


def identity(evaluation: Evaluation) -> str:
    """A hash of the results, independent of times."""
    card = evaluation.card.model_dump(mode="json", include={"scores", "settings", "digest"})
    text = json.dumps(card, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _added_up(
    asked: Mapping[str, Any], leaves: Sequence[str], scores: Mapping[str, Score]
) -> Score | None:
    from lm_eval.api import metrics

    found = [scores[key] for leaf in leaves if (key := f"{leaf}/{asked['metric']}") in scores]
    if not found or len(found) < len(leaves):
        return None
    sizes, weighted = [score.n for score in found], bool(asked["weight_by_size"])
    errors = [score.stderr for score in found if score.stderr is not None]
    stderr = None
    if len(errors) == len(found):
        stderr = float(
            metrics.pooled_sample_stderr(errors, sizes)
            if weighted
            else metrics.unweighted_mean_stderr(errors)
        )
    value = metrics.aggregate_subtask_metrics([score.value for score in found], sizes, weighted)
    return Score(
        value=float(value),
        stderr=stderr,
        n=sum(sizes),
        higher_is_better=found[0].higher_is_better,
    )


def _leaves(name: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if name not in groups:
        return [name]
    return [leaf for member in groups[name]["members"] for leaf in _leaves(member, groups)]


def _task_of(key: str) -> str:
    return key.rpartition("/")[0]
