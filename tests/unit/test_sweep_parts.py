"""Scores task by task, put together again: the same as if all had been asked at once."""

import math

import pytest

from quantkit.scoring.answers import Outcome
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.scorecard import Score, Scorecard, Settings
from quantkit.sweep import parts

SIZES = {"algebra": 100, "anatomy": 50, "law": 10}
RIGHT = {"algebra": 60, "anatomy": 20, "law": 9}
GROUPS = {
    "exam": {
        "members": ["science", "law"],
        "metrics": [{"metric": "acc", "weight_by_size": True}],
        "version": "2",
        "is_tag": False,
    },
    "science": {
        "members": ["science_tasks"],
        "metrics": [{"metric": "acc", "weight_by_size": False}],
        "version": "1",
        "is_tag": False,
    },
    "science_tasks": {
        "members": ["algebra", "anatomy"],
        "metrics": [],
        "version": "",
        "is_tag": True,
    },
}


def stderr(task: str) -> float:
    share = RIGHT[task] / SIZES[task]
    return math.sqrt(share * (1 - share) / (SIZES[task] - 1))


def evaluation(tasks: list[str]) -> Evaluation:
    scores = {
        f"{task}/acc": Score(
            value=RIGHT[task] / SIZES[task],
            stderr=stderr(task),
            n=SIZES[task],
            higher_is_better=True,
        )
        for task in tasks
    }
    settings = Settings(
        tasks=dict.fromkeys(tasks, "1.0"),
        limit=None,
        num_fewshot=None,
        max_length=64,
        seed=0,
        data={task: f"hash of {task}" for task in tasks},
    )
    card = Scorecard(
        name="demo",
        recipe=None,
        format="safetensors",
        size_bytes=1,
        bits_per_weight=16,
        digest="d",
        source_fingerprint="d",
        scores=scores,
        settings=settings,
        versions={},
        device="cpu",
        seconds=2.0,
        created="2026-01-01",
    )
    outcomes = [
        Outcome(task, n, str(n), "acc", float(n < RIGHT[task]), 1.0)
        for task in tasks
        for n in range(SIZES[task])
    ]
    return Evaluation(card, outcomes)


def test_taken_apart_and_put_together_nothing_changes():
    whole = evaluation(list(SIZES))
    split = [parts.only(whole, task) for task in SIZES]
    assert [len(part.outcomes) for part in split] == list(SIZES.values())
    again = parts.merged(split, list(SIZES), {})
    assert again.card.scores == whole.card.scores
    assert again.card.settings == whole.card.settings
    assert again.outcomes == whole.outcomes
    assert parts.identity(again) == parts.identity(whole)


def test_groups_are_added_up_by_questions_or_by_tasks():
    split = [evaluation([task]) for task in SIZES]
    card = parts.merged(split, ["exam"], GROUPS, "other").card
    assert card.name == "other"
    assert card.settings.tasks == {"exam": "2"}
    assert card.groups == {"exam": ["algebra", "anatomy", "law"], "science": ["algebra", "anatomy"]}
    exam, science = card.scores["exam/acc"], card.scores["science/acc"]
    assert (exam.n, exam.value) == (160, pytest.approx((60 + 20 + 9) / 160))
    assert science.value == pytest.approx((0.6 + 0.4) / 2)
    wanted = math.sqrt(stderr("algebra") ** 2 + stderr("anatomy") ** 2) / 2
    assert science.stderr == pytest.approx(wanted)
    pooled = sum((SIZES[t] - 1) * stderr(t) ** 2 * SIZES[t] for t in SIZES) / (160 - 3)
    assert exam.stderr == pytest.approx(math.sqrt(pooled / 160))


def test_a_group_with_a_part_missing_has_no_score():
    card = parts.merged([evaluation(["algebra", "law"])], ["exam"], GROUPS).card
    assert "exam/acc" not in card.scores
    assert "algebra/acc" in card.scores


def test_identity_minds_scores_and_not_the_time():
    one, other = evaluation(["law"]), evaluation(["law"])
    later = Evaluation(other.card.model_copy(update={"seconds": 9.0, "created": "later"}), [])
    changed = evaluation(["law"]).card
    score = changed.scores["law/acc"].model_copy(update={"value": 0.5})
    worse = Evaluation(changed.model_copy(update={"scores": {"law/acc": score}}), [])
    assert parts.identity(one) == parts.identity(later) != parts.identity(worse)


def test_predictions_of_two_texts_that_were_scored_at_once_are_found(tmp_path):
    from quantkit.sweep.work import link_references

    for text in ("one", "two"):  # a source's score of each text holds what was kept of both
        (tmp_path / text / "references").mkdir(parents=True)
        for name in ("a.reference", "b.reference"):
            (tmp_path / text / "references" / name).write_text(name)
    cache = tmp_path / "cache"
    cache.mkdir()
    link_references([tmp_path / "one", tmp_path / "two", tmp_path / "no text"], cache)
    assert {p.name: p.read_text() for p in cache.iterdir()} == {
        name: name for name in ("a.reference", "b.reference")
    }
