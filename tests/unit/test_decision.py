"""Which candidate a report recommends: by every task and whole intervals, or none."""

import math
import random

import pytest
from gate_reports import SETTINGS, card

from quantkit.report import markdown, table
from quantkit.report.comparison import Report
from quantkit.scoring.answers import Outcome
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.scorecard import Score

MANY = 6000


def quiz(task, right, n, seed=0, chance=0.25, metric="acc"):
    """Answers of which a share is right; the same questions whatever the share."""
    rng = random.Random(f"{task} {seed}")
    hard = [rng.random() for _ in range(n)]
    return [
        Outcome(task, place, f"{task}{place}", metric, float(hard[place] < right), 1.0, chance)
        for place in range(n)
    ]


def text(task, growth, n_documents=40, n_tokens=400, spread=0.002):
    """Documents whose loss grew about evenly, by per cent of perplexity in all."""
    change = math.log1p(growth / 100)
    return [
        Outcome(
            task,
            place,
            f"{task}{place}",
            "loss",
            n_tokens * (2.0 + change + (spread * (-1) ** place if growth else 0.0)),
            float(n_tokens),
        )
        for place in range(n_documents)
    ]


def evaluation(name, outcomes, recipe="fp8-dynamic", answers=True, size=300, groups=None):
    """Scores that fit the outcomes, and the outcomes."""
    scores, tasks = {}, {}
    for key in dict.fromkeys((o.task, o.metric) for o in outcomes):
        task, metric = key
        found = [o for o in outcomes if (o.task, o.metric) == key]
        tasks[task] = "1"
        if metric == "loss":
            total = sum(o.weight for o in found)
            value = math.exp(sum(o.value for o in found) / total)
            scores[f"{task}/word_perplexity"] = Score(value=value, stderr=None, n=len(found))
            scores[f"{task}/perplexity"] = Score(value=value, stderr=0.2, n=int(total))
        elif metric == "perplexity":
            value = math.exp(-sum(o.value for o in found) / len(found))
            scores[f"{task}/perplexity"] = Score(value=value, stderr=0.2, n=len(found))
        else:
            share = sum(o.value for o in found) / len(found)
            error = math.sqrt(share * (1 - share) / len(found))
            scores[f"{task}/{metric}"] = Score(
                value=share, stderr=error, n=len(found), higher_is_better=True
            )
    settings = SETTINGS.model_copy(update={"tasks": tasks, "data": None})
    one = card(
        name,
        recipe,
        scores=scores,
        settings=settings,
        size_bytes=1000 if recipe is None else size,
        groups=groups or {},
    )
    return Evaluation(one, outcomes if answers else ())


def source(outcomes, **more):
    return evaluation("src", outcomes, recipe=None, **more)


def recommended(*evaluations):
    return Report.of(list(evaluations)).recommendation


def test_a_candidate_that_loses_little_is_recommended():
    found = recommended(
        source(text("wiki", 0) + quiz("quiz", 0.7, MANY)),
        evaluation("good", text("wiki", 1) + quiz("quiz", 0.699, MANY)),
        evaluation("bad", text("wiki", 9) + quiz("quiz", 0.699, MANY), size=200),
    )
    assert found.name == "good"
    assert "wiki/perplexity +3% and quiz/acc -1 point" in found.reason
    assert found.not_judged == []


def test_without_answers_a_collapse_of_accuracy_is_not_recommended():
    # MMLU from 65% to 30% was, because nothing but answers was looked at.
    before = text("wiki", 0) + quiz("mmlu", 0.65, 14042)
    after = text("wiki", 1) + quiz("mmlu", 0.30, 14042)
    found = recommended(source(before, answers=False), evaluation("one", after, answers=False))
    assert found.name is None
    # Texts alone have answers, as where only some of the files were kept.
    found = recommended(source(text("wiki", 0)), evaluation("one", text("wiki", 1)))
    assert found.name == "one"
    some = Evaluation(evaluation("one", after).card, text("wiki", 1))
    found = recommended(Evaluation(source(before).card, text("wiki", 0)), some)
    assert found.name is None
    assert "stays within" in found.reason
    assert "no shown drop" not in found.reason


def test_scores_alone_are_judged_by_what_they_hold():
    def scored(n, right=0.65):
        return recommended(
            source(quiz("quiz", 0.65, n), answers=False),
            evaluation("one", quiz("quiz", right, n), answers=False),
        )

    few = scored(2000)
    assert few.name is None
    # 1.96 standard errors of two models with 65% of 2,000 right, and a little more.
    assert "quiz/acc may have fallen by up to 3.0 points" in few.reason
    assert "keep them next to the scores" in few.reason
    assert scored(40_000).name == "one"
    assert scored(40_000, right=0.6).name is None


def test_perplexities_without_answers_or_errors_are_not_recommended():
    before, after = source(text("wiki", 0)), evaluation("one", text("wiki", 0.1))
    for update in ({"stderr": 0.2}, {"stderr": None}):
        cards = []
        for one in (before, after):
            scores = dict(one.card.scores)
            scores["wiki/perplexity"] = scores["wiki/perplexity"].model_copy(update=update)
            cards.append(Evaluation(one.card.model_copy(update={"scores": scores}), ()))
        found = recommended(*cards)
        assert found.name is None
        told = "neither paired answers nor a standard error"
        assert (told in found.reason) is (update["stderr"] is None)


@pytest.mark.parametrize("others", [0, 3, 9])
def test_more_candidates_do_not_make_the_check_laxer(others):
    # 17 answers lost and 6 gained of 440, 2.5 points: p = 0.035, and 0.14 adjusted for four.
    def answered(lost, gained):
        right = [place < 300 for place in range(440)]
        right[:lost] = [False] * lost
        right[300 : 300 + gained] = [True] * gained
        return text("wiki", 1 if lost else 0) + [
            Outcome("quiz", place, f"q{place}", "acc", float(is_right), 1.0, 0.25)
            for place, is_right in enumerate(right)
        ]

    rest = [evaluation(f"same{place}", answered(0, 0), size=500) for place in range(others)]
    lossy = evaluation("lossy", answered(17, 6), size=200)
    found = recommended(source(answered(0, 0)), lossy, *rest)
    assert found.name == ("same0" if others else None)


def test_the_second_accuracy_and_the_second_perplexity_count():
    before = text("wiki", 0) + text("code", 0) + quiz("a", 0.7, MANY) + quiz("b", 0.7, MANY)

    def found(code, b):
        after = text("wiki", 1) + text("code", code) + quiz("a", 0.7, MANY) + quiz("b", b, MANY)
        return recommended(source(before), evaluation("one", after))

    assert found(1, 0.7).name == "one"
    assert found(9, 0.7).name is None
    assert found(1, 0.6).name is None


def test_an_interval_that_crosses_the_limit_is_not_enough():
    before = text("wiki", 0)
    near = evaluation("one", text("wiki", 2.9, spread=0.02))
    found = recommended(source(before), near)
    assert found.name is None
    assert "wiki/perplexity +3%" in found.reason
    assert "documents would settle it, 40 were compared" in found.reason


def test_few_questions_recommend_nothing_and_say_how_many_would():
    before, after = quiz("quiz", 0.7, 400), quiz("quiz", 0.69, 400)
    found = recommended(
        source(text("wiki", 0) + before), evaluation("one", text("wiki", 1) + after)
    )
    assert found.name is None
    assert "one comes closest: quiz/acc may have fallen by up to" in found.reason
    assert "questions would settle it, 400 were compared" in found.reason


def test_one_document_recommends_nothing():
    thin = {"n_documents": 1, "n_tokens": 40}
    found = recommended(
        source(text("wiki", 0, **thin)), evaluation("one", text("wiki", 0.1, **thin))
    )
    assert found.name is None
    assert "wiki/perplexity rests on 1 document and 40 tokens" in found.reason
    assert "at least 20 documents and 5,000 tokens" in found.reason


def test_an_accuracy_that_the_source_guesses_is_said_not_to_be_judged():
    before = text("wiki", 0) + quiz("hard", 0.25, MANY)
    after = text("wiki", 1) + quiz("hard", 0.2, MANY)
    report = Report.of([source(before), evaluation("one", after)])
    found = report.recommendation
    assert found.name == "one"
    assert found.not_judged == ["hard/acc (the source itself does no better than guessing)"]
    assert "not judged: hard/acc" in found.reason
    assert "hard/acc -1 point" not in found.reason
    for told in (markdown.render(report), "\n".join(table.advice(report))):
        assert "not judged: hard/acc" in told
    assert report.to_json()["recommended"]["not_judged"] == found.not_judged
    # Nothing else was scored: nothing is known.
    alone = recommended(
        source(quiz("hard", 0.25, MANY)), evaluation("one", quiz("hard", 0.2, MANY))
    )
    assert alone.name is None
    assert alone.reason.startswith("nothing could be judged; not judged: hard/acc")


def test_a_few_questions_do_not_show_that_the_source_guesses():
    before = text("wiki", 0) + quiz("hard", 0.3, 40)
    found = recommended(source(before), evaluation("one", text("wiki", 1) + quiz("hard", 0.1, 40)))
    assert found.name is None
    assert "at least 200 questions" in found.reason


def test_a_score_that_a_candidate_or_its_source_lacks():
    before, after = text("wiki", 0) + quiz("quiz", 0.7, MANY), text("wiki", 1)
    lacking = evaluation("one", after)
    settings = source(before).card.settings
    lacking = Evaluation(lacking.card.model_copy(update={"settings": settings}), after)
    full = Evaluation(source(before).card, text("wiki", 0))
    found = recommended(full, lacking)
    assert found.name is None
    assert "quiz/acc is not scored for one" in found.reason
    bare = source(text("wiki", 0))
    bare = Evaluation(bare.card.model_copy(update={"settings": settings}), text("wiki", 0))
    found = recommended(
        bare, Evaluation(evaluation("one", text("wiki", 1) + quiz("quiz", 0.7, MANY)).card, after)
    )
    assert found.name == "one"
    assert found.not_judged == ["quiz/acc (the source has no such score)"]


def test_a_group_counts_once_and_not_by_each_of_its_tasks():
    names = [f"m{place}" for place in range(40)]
    groups = {"m": names}

    def scored(name, right, recipe):
        outcomes = [o for n in names for o in quiz(n, right, 300, seed=1)]
        one = evaluation(name, outcomes, recipe=recipe, groups=groups)
        pooled = sum(o.value for o in outcomes) / len(outcomes)
        scores = {
            **one.card.scores,
            "m/acc": Score(value=pooled, stderr=0.004, n=len(outcomes), higher_is_better=True),
        }
        settings = one.card.settings.model_copy(update={"tasks": {"m": "1"}})
        update = {"scores": scores, "settings": settings}
        return Evaluation(one.card.model_copy(update=update), outcomes)

    found = recommended(scored("src", 0.7, None), scored("one", 0.698, "fp8-dynamic"))
    assert found.name == "one"
    assert "m/acc -1 point" in found.reason
    assert "m0/acc" not in found.reason


def test_a_task_without_perplexity_or_accuracy_is_said_not_to_be_judged():
    one, other = source(text("wiki", 0)), evaluation("one", text("wiki", 1))
    cards = []
    for e in (one, other):
        tasks = {**e.card.settings.tasks, "summaries": "1"}
        settings = e.card.settings.model_copy(update={"tasks": tasks})
        scores = {**e.card.scores, "summaries/rouge1": Score(value=0.3, stderr=0.01, n=500)}
        update = {"settings": settings, "scores": scores}
        cards.append(Evaluation(e.card.model_copy(update=update), e.outcomes))
    found = recommended(*cards)
    assert found.name == "one"
    assert found.not_judged == ["summaries (it gives no perplexity or accuracy)"]


def test_the_perplexity_of_a_word_is_paired_like_that_of_a_text():
    """LAMBADA logs a log-likelihood for every document."""

    def words(shift):
        rng = random.Random(0)
        spread = random.Random(1)
        return [
            Outcome(
                "lambada",
                i,
                f"l{i}",
                "perplexity",
                -rng.uniform(0.5, 3) - shift + (spread.gauss(0, 0.1) if shift else 0),
                1.0,
            )
            for i in range(5200)
        ]

    before, after = source(words(0.0)), evaluation("one", words(0.01))
    (finding,) = Report.of([before, after]).findings["one"]
    assert finding.score == "lambada/perplexity"
    assert finding.change.ratio == pytest.approx(math.exp(0.01), abs=0.005)
    assert Report.of([before, after]).recommendation.name == "one"
    worse = evaluation("one", words(0.2))
    assert Report.of([before, worse]).recommendation.name is None
