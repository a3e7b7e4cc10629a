"""The policies that ship: exit code 0 means that an engineer would ship the checkpoint."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from gate_reports import changed, made, report, rescored

from quantkit.gating import policy
from quantkit.gating.classes import SIZES, size_of
from quantkit.gating.judge import judge
from quantkit.gating.policy import Policy
from quantkit.gating.verdict import Answer
from quantkit.report.document import read

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "report.json"
PASS, FAIL, CANNOT_TELL = Answer
WEIGHTS = {"under-1B": 5e8, "1B-4B": 1.5e9, "4B-15B": 8e9, "over-15B": 7e10}
BITS = {"8-bit": 8, "4-bit": 4, "below": 3}


def judged(document):
    return judge(document, policy.default())


def answers(document):
    return {check.metric: check.answer for check in judged(document).checks}


def sized(document, n_weights):
    """The same of a source with so many weights, in 16 bits."""
    n_bytes = int(2 * n_weights)
    baseline = document.baseline.model_copy(update={"size_bytes": n_bytes})
    document = document.model_copy(update={"baseline": baseline})
    return changed(document, size_bytes=int(0.3 * n_bytes))


def grown(percent, bits=4, **counts):
    """One candidate whose perplexity grew, and nothing else."""
    loss = 2.0 + math.log1p(percent / 100)
    document = report(("one", "gptq-w4a16", 0.7, loss, bits), **counts)
    return rescored(rescored(document, "wiki/kl_mean", 0.001), "wiki/top1_agreement", 0.995)


def restated(document, key, **update):
    """The same with one candidate's score told otherwise."""
    scores = dict(document.candidates[0].scores)
    scores[key] = scores[key].model_copy(update=update)
    return changed(document, scores=scores)


def test_what_an_engineer_would_ship_passes():
    for bits in (8, 4):
        verdict = judged(grown(0.5, bits, n=1000))
        assert (verdict.outcome, verdict.exit_code) == (PASS, 0)
        assert {check.answer for check in verdict.checks} == {PASS}


def test_the_checkpoint_that_used_to_pass_fails():
    # +24% perplexity, a divergence of 0.24, 71% agreement, 7 points fewer on 200 questions.
    document = report(("one", "rtn-w4a16", 0.63, 2.0 + math.log(1.24)), n=200)
    document = rescored(rescored(document, "wiki/kl_mean", 0.24), "wiki/top1_agreement", 0.71)
    counts = {"gained": 10, "lost": 24, "difference": -0.07}
    text, quiz = (document.candidates[0].comparison(k) for k in ("wiki/perplexity", "quiz/acc"))
    document = changed(document, comparisons=[text, quiz.model_copy(update=counts)])
    verdict = judged(document)
    assert verdict.exit_code == 1
    failed = {check.metric for check in verdict.failures}
    assert failed == {"wiki/perplexity", "wiki/kl_mean", "wiki/top1_agreement"}
    # That many questions leave a drop of 3 points open, which is not a pass either.
    assert answers(document)["quiz/acc"] is CANNOT_TELL


@pytest.mark.parametrize("size", SIZES)
def test_no_size_passes_20_percent_in_4_bits(size):
    document = sized(grown(20.0, n=1000), WEIGHTS[size])
    assert size_of(document) == size
    verdict = judged(document)
    assert verdict.exit_code == 1
    assert [check.metric for check in verdict.failures] == ["wiki/perplexity"]


@pytest.mark.parametrize("bits", BITS)
def test_limits_are_no_looser_for_larger_models_and_more_bits(bits):
    by_size = {
        (rule.bits, rule.size): rule.limits
        for rule in policy.default().rules
        if rule.size is not None
    }
    for smaller, larger in pairwise(SIZES):
        loose, tight = by_size[bits, smaller], by_size[bits, larger]
        assert tight["perplexity"].max_increase_pct <= loose["perplexity"].max_increase_pct
        assert tight["kl_mean"].max <= loose["kl_mean"].max
        assert tight["top1_agreement"].min >= loose["top1_agreement"].min
        assert tight["accuracy"].max_drop <= loose["accuracy"].max_drop
    for size in SIZES:
        eight, four = by_size["8-bit", size], by_size["4-bit", size]
        assert eight["perplexity"].max_increase_pct < four["perplexity"].max_increase_pct
        assert four["perplexity"].max_increase_pct < 20


def test_the_same_loss_passes_in_a_small_model_and_fails_in_a_large_one():
    document = grown(8.0, n=1000)
    assert judged(sized(document, 5e8)).exit_code == 0
    assert judged(sized(document, 8e9)).exit_code == 1


def test_a_report_of_one_document_is_not_judged():
    verdict = judged(grown(0.1, n=1000, n_documents=1, n_tokens=40))
    assert (verdict.outcome, verdict.exit_code) == (CANNOT_TELL, 3)
    open_ones = {check.metric: check.reason for check in verdict.of(CANNOT_TELL)}
    assert set(open_ones) == {"wiki/perplexity", "wiki/kl_mean", "wiki/top1_agreement"}
    for reason in open_ones.values():
        assert "it rests on 1 document and 40" in reason
    assert "at least 20 documents and 2,000 positions" in open_ones["wiki/kl_mean"]


@pytest.mark.parametrize(
    ("counts", "metric"),
    [
        ({"n_documents": 19}, "wiki/perplexity"),
        ({"n_tokens": 166}, "wiki/perplexity"),  # 4,980 in all
        ({"n_documents": 19}, "wiki/kl_mean"),
        ({"n_tokens": 66}, "wiki/top1_agreement"),
        ({"n": 199}, "quiz/acc"),
    ],
)
def test_less_than_the_floor_is_not_judged(counts, metric):
    enough = {"n": 1000, "n_documents": 30, "n_tokens": 400}
    assert answers(grown(0.1, **enough))[metric] is PASS
    assert answers(grown(0.1, **enough | counts))[metric] is CANNOT_TELL


def test_what_is_broken_fails_on_little_evidence_too():
    verdict = judged(grown(300.0, n_documents=10))
    assert verdict.exit_code == 1
    assert [check.metric for check in verdict.failures] == ["wiki/perplexity"]


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [("wiki/kl_mean", 0.095, 0.105), ("wiki/top1_agreement", 0.855, 0.845)],
)
def test_divergence_is_judged_by_the_ends_of_its_interval(key, inside, outside):
    document = grown(0.1, n=1000)
    for value in (inside, outside):
        sure = PASS if value == inside else FAIL
        assert answers(restated(document, key, value=value, stderr=0.001))[key] is sure
        assert answers(restated(document, key, value=value, stderr=0.01))[key] is CANNOT_TELL
    # Without a standard error nothing is passed, and what is beyond its limit still fails.
    assert answers(restated(document, key, value=inside, stderr=None))[key] is CANNOT_TELL
    assert answers(restated(document, key, value=outside, stderr=None))[key] is FAIL


def test_few_documents_make_the_interval_of_a_divergence_wider():
    limits = {"kl_mean": {"max": 0.1, "confidence": 0.95}}
    rules = Policy.model_validate({"rules": [limits]})
    widths = []
    for n_documents in (5, 30):
        document = restated(
            grown(0.1, n_documents=n_documents), "wiki/kl_mean", value=0.09, stderr=0.001
        )
        (check,) = judge(document, rules).checks
        widths.append((check.high - check.low) / 2)
    # Student's t with 4 and 29 degrees of freedom.
    assert widths == pytest.approx([0.0027764, 0.0020452], rel=1e-3)


def test_perplexity_is_judged_by_the_far_end_of_its_interval():
    document = grown(9.9, n=1000)
    known = document.candidates[0].comparison("wiki/perplexity")
    assert known.ratio < 1.1 < known.high
    assert answers(document)["wiki/perplexity"] is CANNOT_TELL


def test_every_scored_task_is_judged():
    document = grown(0.1, n=1000)
    settings = document.baseline.settings
    settings = settings.model_copy(update={"tasks": {**settings.tasks, "second": "1", "code": "1"}})

    def with_more(entry, right, perplexity):
        scores = dict(entry.scores)
        scores["second/acc"] = scores["quiz/acc"].model_copy(update={"value": right})
        scores["code/perplexity"] = scores["wiki/perplexity"].model_copy(
            update={"value": perplexity}
        )
        return entry.model_copy(update={"scores": scores, "settings": settings})

    baseline = with_more(document.baseline, 0.7, 3.0)
    document = document.model_copy(update={"baseline": baseline})
    entry = with_more(document.candidates[0], 0.4, 6.0)
    doubled = {"score": "code/perplexity", "ratio": 2.0, "low": 1.98, "high": 2.02, "intervals": {}}
    text = entry.comparison("wiki/perplexity").model_copy(update=doubled)
    entry = entry.model_copy(update={"comparisons": [*entry.comparisons, text]})
    verdict = judged(document.model_copy(update={"candidates": [entry]}))
    assert [c.metric for c in verdict.failures] == ["code/perplexity", "second/acc"]
    assert {"quiz/acc", "wiki/perplexity"} <= {c.metric for c in verdict.of(PASS)}
    # Where a short name stands for several, the table shows which is which.
    assert {c.asked for c in verdict.checks} >= {"quiz/acc", "second/acc", "wiki/perplexity"}


def test_what_the_published_report_holds():
    verdict = judged(read(PUBLISHED))
    assert verdict.exit_code == 1
    # The 4-bit candidates lose 13% to 17%, which a 135M model should not ship with either.
    assert {check.candidate for check in verdict.failures} == {
        "awq-gptq-w4a16",
        "awq-w4a16",
        "gptq-w4a16",
    }
    eight = [c for c in verdict.checks if c.candidate in ("int8-w8a8", "fp8-dynamic", "fp8-static")]
    # MMLU says nothing of a model that guesses, and the gate says so.
    assert {c.metric for c in eight if c.answer is not PASS} == {"mmlu/acc"}
    assert {c.answer for c in eight if c.metric == "mmlu/acc"} == {CANNOT_TELL}


@pytest.mark.parametrize(
    ("key", "value"), [("wikitext/kl_mean", 0.7), ("wikitext/top1_agreement", 0.4)]
)
def test_broken_checkpoints_fail(key, value):
    published = read(PUBLISHED)
    for place, entry in enumerate(published.candidates[:3]):
        verdict = judged(rescored(published, key, value, place))
        assert entry.name in {check.candidate for check in verdict.failures if check.metric == key}


@pytest.mark.parametrize(
    ("n_weights", "size"),
    [(1.35e8, "under-1B"), (1.24e9, "1B-4B"), (4.02e9, "4B-15B"), (7e10, "over-15B")],
)
@pytest.mark.parametrize("bits_per_weight", [16.0, 8.1])
def test_the_class_of_a_size_comes_from_the_source(n_weights, size, bits_per_weight):
    document = grown(0.1)
    n_bytes = int(n_weights * bits_per_weight / 8)
    update = {"size_bytes": n_bytes, "bits_per_weight": bits_per_weight}
    baseline = document.baseline.model_copy(update=update)
    document = document.model_copy(update={"baseline": baseline})
    document = changed(document, size_bytes=n_bytes // 4, made=made(4))
    assert size_of(document) == size
    assert {check.answer for check in judged(document).checks} <= {PASS, CANNOT_TELL}
