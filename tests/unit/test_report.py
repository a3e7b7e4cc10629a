"""What a report shows of scores and answers."""

import random
from pathlib import Path

import pytest

from quantkit.export.verified import Verified
from quantkit.report import damage, html, markdown, table
from quantkit.report.comparison import Report
from quantkit.scoring.answers import Outcome
from quantkit.scoring.evaluation import Evaluation, read_all
from quantkit.scoring.scorecard import Score, Settings

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "scores"
SUBJECTS = {"mmlu_stem": ["mmlu_anatomy", "mmlu_astronomy"], "mmlu_humanities": ["mmlu_law"]}


@pytest.fixture(scope="module")
def cards():
    return [evaluation.card for evaluation in read_all([PUBLISHED])]


def answered(rate, seed, n=300):
    """Right and wrong answers to questions with four choices."""
    rng = random.Random(seed)
    return [
        Outcome(task, place, f"{task}{place}", "acc", float(rng.random() < rate), 1.0, 0.25)
        for tasks in SUBJECTS.values()
        for task in tasks
        for place in range(n)
    ]


def report_of(cards, source_rate):
    groups = SUBJECTS | {"mmlu": [task for tasks in SUBJECTS.values() for task in tasks]}
    return Report.of(
        [
            Evaluation(card.model_copy(update={"groups": groups}), answered(source_rate, seed))
            for seed, card in enumerate(cards)
        ]
    )


def test_the_accuracy_shown_is_the_one_asked_for(cards):
    assert Report.compare(cards).accuracy == "mmlu/acc"


def test_markdown_has_divergence_and_groups(cards):
    text = markdown.render(report_of(cards, 0.7))
    header = next(line for line in text.splitlines() if line.startswith("| model | size"))
    assert header.endswith("| KL mean | KL p99 | top-1 agreement |")
    assert "| model | mmlu\\_stem | mmlu\\_humanities |" in text
    assert len(text.splitlines()) <= 60
    assert table.GUESSED not in text


def test_a_source_that_guesses_is_told(cards):
    report = report_of(cards, 0.25)
    assert report.is_guessed("mmlu/acc")
    assert table.GUESSED in markdown.render(report)
    comparisons = report.to_json()["candidates"][0]["comparisons"]
    assert all(entry["source_at_chance"] for entry in comparisons)


def test_a_source_that_knows_something_is_not_called_guessing(cards):
    assert not report_of(cards, 0.35).is_guessed("mmlu/acc")


def test_what_an_engine_did_is_shown_in_every_form(cards):
    source, first, *rest = sorted(cards, key=lambda card: card.recipe is not None)
    record = Verified(
        ok=True,
        digest=first.digest,
        engine="vllm",
        version="0.32.0",
        device="NVIDIA H200",
        dtype="bfloat16",
        level="generate",
        created="2026-01-01T00:00:00+00:00",
    )
    plain = markdown.render(Report.compare(cards))
    assert "Checked in" not in plain
    proven = first.model_copy(update={"verified": record})
    report = Report.compare([source, proven, *rest])
    assert f"Checked in vLLM 0.32.0: text ({first.name})." in markdown.render(report)
    page = html.render(report.document, "0")
    assert "Proven in" in page
    assert "vLLM 0.32.0: text" in page
    assert "Proven in" not in html.render(Report.compare(cards).document, "0")
    told = {entry["name"]: entry["verified"] for entry in report.to_json()["candidates"]}
    assert told[first.name]["device"] == "NVIDIA H200"


def test_a_share_of_right_answers_changes_by_points(cards):
    only = [
        card.model_copy(update={"scores": {"mmlu/acc": card.scores["mmlu/acc"]}}) for card in cards
    ]
    report = Report.compare(only)
    source, *others = table.rows(report)
    assert source[4].endswith("%")
    assert all(row[5].endswith(" points") for row in others)
    before = report.baseline.scores["mmlu/acc"].value
    first = report.candidates[0].scores["mmlu/acc"].value
    assert others[0][5] == f"{100 * (first - before):+.1f} points"


def test_what_breaks_first_is_what_loses_most_for_certain(cards):
    """A large loss that may be chance is none, and a gain neither."""
    source, card = sorted(cards, key=lambda card: card.recipe is not None)[:2]
    rates = {"sums/exact_match": (0.8, 0.3, 20), "code/pass@1": (0.8, 0.7, 2000)}
    rates |= {"maths/exact_match": (0.6, 0.4, 10), "chat/valid_json": (0.5, 0.52, 500)}
    tasks = {name.partition("/")[0]: "1" for name in rates}

    def evaluated(card, which):
        scores, outcomes = {}, []
        for name, (*shares, n) in rates.items():
            task, _, metric = name.partition("/")
            right = [float(i < shares[which] * n) for i in range(n)]
            outcomes += [
                Outcome(task, i, f"{task}{i}", metric, value, 1.0) for i, value in enumerate(right)
            ]
            scores[name] = Score(value=sum(right) / n, stderr=0.01, n=n, higher_is_better=True)
        if which:
            scores["chat/first_difference"] = Score(value=31.5, stderr=2.0, n=40)
        settings = card.settings.model_copy(update={"tasks": tasks})
        new = {"scores": scores, "groups": {}, "settings": settings}
        return Evaluation(card.model_copy(update=new), outcomes)

    report = Report.of([evaluated(source, 0), evaluated(card, 1)])
    found = damage.losses(report.document, report.document.candidates[0])
    assert [loss.score for loss in found] == ["sums/exact_match", "code/pass@1"]
    assert 0 < found[1].least < 0.1 / 0.8 < found[0].least
    (row,) = damage.rows(report.document)
    assert row[1].startswith("sums/exact_match -50.0 points (")
    assert row[3:] == ["31.5 +- 3.9", ""]
    assert damage.TITLE in markdown.render(report)
    assert "31.5 +- 3.9" in html.render(report.document, "1")
    assert damage.TITLE not in markdown.render(Report.compare(cards))


def test_what_makes_scores_incomparable_names_the_tasks():
    def settings(**given):
        usual = {"limit": None, "num_fewshot": None, "max_length": 64, "seed": 0}
        return Settings(**{**usual, **given})

    one = settings(tasks={"wikitext": "2", "mmlu": "1"}, data={"wikitext": "a", "mmlu_law": "b"})
    for other, said in (
        (
            settings(tasks={"wikitext": "2"}, data={"wikitext": "a"}),
            ["only one was scored on mmlu"],
        ),
        (
            settings(tasks={"wikitext": "3", "mmlu": "1"}, data=one.data, limit=5),
            ["version of wikitext: 2 against 3", "limit: none against 5"],
        ),
        (
            settings(tasks=one.tasks, data={**one.data, "wikitext": "c"}),
            ["the documents of wikitext"],
        ),
        (settings(tasks=one.tasks, data={"wikitext": "a"}), ["the documents of mmlu_law"]),
        (settings(tasks=one.tasks), []),  # an old file
    ):
        assert one.differences(other) == said
        assert bool(other.differences(one)) == bool(said)


def test_every_score_that_decides_is_shown(cards):
    """`acc_norm` reads the answers of `acc` again, and decides as well."""

    def also(card, seed):
        scores = {"quiz/acc": card.scores["mmlu/acc"], "quiz/acc_norm": card.scores["mmlu/acc"]}
        scores |= {"wikitext/perplexity": card.scores["wikitext/perplexity"]}
        settings = card.settings.model_copy(update={"tasks": {"wikitext": "2", "quiz": "1"}})
        rng = random.Random(seed)
        answers = [
            Outcome("quiz", place, f"{place}", metric, float(rng.random() < 0.7), 1.0, 0.25)
            for metric in ("acc", "acc_norm")
            for place in range(300)
        ]
        made = card.model_copy(update={"scores": scores, "settings": settings, "groups": {}})
        return Evaluation(made, answers)

    report = Report.of([also(card, seed) for seed, card in enumerate(cards)])
    assert "quiz/acc_norm" in report.recommendation.reason
    assert "quiz/acc_norm" in table.titles(report)
    assert len({len(row) for row in (table.titles(report), *table.rows(report))}) == 1
    assert "quiz/acc_norm" in table.verdicts(report)
    text = html.render(report.document, "0")
    assert "Length-normalised accuracy" in text
    assert "<caption>quiz/acc_norm" in text or "quiz/acc_norm</" in text
    narrow = table.titles(report, narrow=True)
    assert not any("acc_norm" in title for title in narrow)
