"""What a gate answers: three answers, unrounded limits, and never a silent pass."""

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate_reports import SETTINGS, card, changed, made, report, rescored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quantkit import metrics
from quantkit.errors import PolicyError, ScoreError
from quantkit.gating import github, intervals, junit, markdown, policy, words
from quantkit.gating.classes import class_of
from quantkit.gating.judge import judge
from quantkit.gating.policy import Policy
from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Verdict
from quantkit.report.document import Comparison, read
from quantkit.scoring.paired import difference_interval
from quantkit.scoring.scorecard import LayerError, Score

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "report.json"
PASS, FAIL, CANNOT_TELL = Answer
ONE_CANDIDATE = report(("one", "gptq-w4a16", 0.69, 2.0))


def rules(cannot_tell="fail", against=(), missing="fail", unjudged="error", **limits):
    one = [limits] if limits else []
    return Policy.model_validate(
        {
            "rules": one,
            "cannot_tell": cannot_tell,
            "missing": missing,
            "unjudged": unjudged,
            "against": list(against),
        }
    )


def answer_of(document, **limits):
    (check,) = judge(document, rules(**limits)).checks
    return check.answer


@pytest.fixture(scope="module")
def good():
    return report(("one", "gptq-w4a16", 0.69, 2.01), ("two", "awq-w4a16", 0.7, 2.02))


@pytest.fixture(scope="module")
def published():
    return read(PUBLISHED)


# Limits


@pytest.mark.parametrize(
    ("limits", "value", "expected"),
    [
        ({"kl_mean": {"max": 0.05}}, ("wiki/kl_mean", 0.05), PASS),
        ({"kl_mean": {"max": 0.05}}, ("wiki/kl_mean", math.nextafter(0.05, 1)), FAIL),
        ({"top1_agreement": {"min": 0.9}}, ("wiki/top1_agreement", 0.9), PASS),
        ({"top1_agreement": {"min": 0.9}}, ("wiki/top1_agreement", math.nextafter(0.9, 0)), FAIL),
        # Decimal numbers as they are written: 0.7 - 0.69 is one point, 10.2 is 2% above 10.
        ({"quiz/acc": {"max_drop": 1}}, ("quiz/acc", 0.69), PASS),
        ({"quiz/acc": {"max_drop": 1}}, ("quiz/acc", math.nextafter(0.69, 0)), FAIL),
        ({"perplexity": {"max_increase_pct": 2}}, ("wiki/perplexity", 10.2), PASS),
        (
            {"perplexity": {"max_increase_pct": 2}},
            ("wiki/perplexity", math.nextafter(10.2, 11)),
            FAIL,
        ),
        ({"perplexity": {"max_increase": 0.2}}, ("wiki/perplexity", 10.2), PASS),
        ({"top1_agreement": {"max_drop": 12}}, ("wiki/top1_agreement", 0.88), PASS),
        ({"top1_agreement": {"max_drop": 12}}, ("wiki/top1_agreement", 0.8799999), FAIL),
    ],
)
def test_what_is_at_the_limit_passes_and_the_next_number_does_not(good, limits, value, expected):
    document = rescored(good, "wiki/perplexity", 10.0, None)
    # Without paired answers, so that the figures themselves are compared.
    document = changed(rescored(document, *value), comparisons=[])
    check = judge(document, rules(**limits)).checks[0]
    assert check.answer is expected


@pytest.mark.parametrize(
    ("limits", "value", "expected"),
    [
        ({"first_difference": {"min": 20}}, ("chat/first_difference", 20.0), PASS),
        ({"first_difference": {"min": 20}}, ("chat/first_difference", 19.9), FAIL),
        ({"same_answers": {"min": 0.5}}, ("chat/same_answers", 0.49), FAIL),
        ({"chat/top1_agreement": {"min": 0.9}}, ("chat/top1_agreement", 0.89), FAIL),
        ({"pass@1": {"max_drop": 5}}, ("code/pass@1", 0.65), PASS),
        ({"pass@1": {"max_drop": 5}}, ("code/pass@1", 0.64), FAIL),
        ({"code": {"max_drop": 5}}, ("code/pass@1", 0.64), FAIL),
        ({"chat": {"max_drop": 5}}, ("chat/valid_json", 0.64), FAIL),
    ],
)
def test_written_answers_have_limits_too(limits, value, expected):
    """Metrics of generation and of following the source, without paired answers."""
    name, found = value
    tasks = {"chat": "1", "code": "1"}
    before = Score(value=0.7, stderr=0.01, n=100, higher_is_better=True)
    after = before.model_copy(update={"value": found})
    settings = ONE_CANDIDATE.baseline.settings.model_copy(update={"tasks": tasks})
    document = changed(ONE_CANDIDATE, comparisons=[], scores={name: after}, settings=settings)
    of_source = {"scores": {name: before}, "settings": settings}
    baseline = document.baseline.model_copy(update=of_source)
    new = {"baseline": baseline, "headline": name, "accuracy": None}
    document = document.model_copy(update=new)
    assert answer_of(document, **limits) is expected


def test_counted_questions_are_exact_where_shares_are_rounded():
    # 1/3 less 97/300 is one point in truth and 1.0000000000000009 of them in floats.
    document = ONE_CANDIDATE
    comparison = document.candidates[0].comparison("quiz/acc")
    update = {"n_questions": 300, "gained": 0, "lost": 3, "difference": -0.01}
    thirds = [comparison.model_copy(update=update)]
    document = changed(rescored(document, "quiz/acc", 97 / 300), comparisons=thirds)
    document = rescored(document, "quiz/acc", 1 / 3, None)
    assert 100 * (1 / 3 - 97 / 300) > 1
    assert answer_of(document, quiz={"max_drop": 1}) is PASS
    assert answer_of(document, quiz={"max_drop": 0.9999}) is FAIL


def test_counts_that_contradict_the_scores_are_not_believed():
    document = ONE_CANDIDATE
    comparison = document.candidates[0].comparison("quiz/acc")
    tampered = [comparison.model_copy(update={"gained": 50, "lost": 0})]
    assert answer_of(changed(document, comparisons=tampered), quiz={"max_drop": 0.5}) is FAIL


@pytest.mark.parametrize(
    ("size", "limit", "expected"), [(350, 0.35, PASS), (351, 0.35, FAIL), (350, 0.3499, FAIL)]
)
def test_size_ratio_comes_from_bytes_not_from_what_the_file_claims(size, limit, expected):
    document = ONE_CANDIDATE
    document = changed(document, size_bytes=size, size_ratio=0.01)
    assert answer_of(document, size_ratio={"max": limit}) is expected


LIMITS = st.sampled_from(
    [
        ("perplexity", "max_increase_pct", 20.0),
        ("perplexity", "max", 12.0),
        ("quiz", "max_drop", 10.0),
        ("kl_mean", "max", 0.2),
        ("size_ratio", "max", 1.0),
    ]
)
RANK = {PASS: 0, CANNOT_TELL: 1, FAIL: 2}


def paired(gained, lost, ratio, n=400):
    """One candidate with these differences from its source, in scores and in comparisons."""
    document = ONE_CANDIDATE
    text = document.candidates[0].comparison("wiki/perplexity")
    quiz = document.candidates[0].comparison("quiz/acc")
    compared = [
        quiz.model_copy(update={"n_questions": n, "gained": gained, "lost": lost}),
        text.model_copy(
            update={"ratio": ratio, "low": 0.99 * ratio, "high": 1.01 * ratio, "intervals": {}}
        ),
    ]
    before = document.baseline.scores["wiki/perplexity"].value
    document = rescored(document, "wiki/perplexity", before * ratio)
    document = rescored(document, "quiz/acc", 0.7 + (gained - lost) / n)
    return changed(document, comparisons=compared)


@settings(max_examples=200, deadline=None)
@given(
    LIMITS,
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 50),
    st.integers(0, 50),
    st.floats(0.95, 1.25),
    st.none() | st.floats(0.6, 0.999),
)
def test_a_tighter_limit_never_answers_better(which, one, other, gained, lost, ratio, confidence):
    metric, kind, most = which
    document = paired(gained, lost, ratio)
    loose, tight = max(one, other) * most, min(one, other) * most
    more = {}
    if confidence is not None and kind in policy.RELATIVE:
        more = {"confidence": confidence}
    first = answer_of(document, **{metric: {kind: loose, **more}})
    second = answer_of(document, **{metric: {kind: tight, **more}})
    assert RANK[second] >= RANK[first]


# Three answers


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.floats(0, 10), st.floats(0.6, 0.999))
def test_three_answers_agree_with_the_interval_of_accuracies(gained, lost, limit, confidence):
    n = 400
    document = ONE_CANDIDATE
    known = document.candidates[0].comparison("quiz/acc")
    counts = {"n_questions": n, "gained": gained, "lost": lost}
    document = changed(document, comparisons=[known.model_copy(update=counts)])
    before = document.baseline.scores["quiz/acc"].value
    document = rescored(document, "quiz/acc", before + (gained - lost) / n, 0)
    low, high = difference_interval(gained, lost, n, confidence)
    found = answer_of(document, quiz={"max_drop": limit, "confidence": confidence})
    if found is PASS:
        assert -100 * low <= limit
    elif found is FAIL:
        assert -100 * high > limit
    else:
        assert -100 * high <= limit < -100 * low


@settings(max_examples=60, deadline=None)
@given(st.floats(0.9, 1.3), st.floats(1e-6, 0.1), st.floats(1e-6, 0.1), st.floats(0, 30))
def test_three_answers_agree_with_the_interval_of_perplexities(ratio, below, above, limit):
    low, high = ratio * math.exp(-below), ratio * math.exp(above)
    assume(all(abs(100 * (end - 1) - limit) > 1e-6 for end in (low, high)))
    document = ONE_CANDIDATE
    known = document.candidates[0].comparison("wiki/perplexity")
    told = known.model_copy(update={"ratio": ratio, "low": low, "high": high, "intervals": {}})
    document = changed(document, comparisons=[told])
    before = document.baseline.scores["wiki/perplexity"].value
    document = rescored(document, "wiki/perplexity", before * ratio, 0)
    found = answer_of(document, perplexity={"max_increase_pct": limit, "confidence": 0.95})
    within, beyond = 100 * (high - 1) <= limit, 100 * (low - 1) > limit
    assert found is (PASS if within else FAIL if beyond else CANNOT_TELL)


def test_intervals_widen_with_confidence():
    pair = Comparison(
        score="x",
        n_questions=400,
        gained=5,
        lost=9,
        low=0,
        high=0,
        p_value=1,
        adjusted_p=1,
        verdict="",
    )
    text = Comparison(
        score="x",
        n_documents=62,
        ratio=1.02,
        low=1.01,
        high=1.03,
        p_value=1,
        adjusted_p=1,
        verdict="",
    )
    for comparison in (pair, text):
        widths = []
        for level in (0.8, 0.9, 0.95, 0.99):
            low, high = intervals.of_change(comparison, level)
            widths.append(high - low)
        assert widths == sorted(widths)
    assert intervals.of_change(text, 0.95) == pytest.approx((1.01, 1.03))


def test_the_published_interval_is_the_one_that_counts(published):
    entry = next(e for e in published.candidates if e.name == "fp8-dynamic")
    known = entry.comparison("wikitext/perplexity")
    verdict = judge(
        published,
        rules(cannot_tell="ask", perplexity={"max_increase_pct": 2.6, "confidence": 0.95}),
    )
    check = next(c for c in verdict.checks if c.candidate == "fp8-dynamic")
    assert (check.low, check.high) == pytest.approx((100 * (known.low - 1), 100 * (known.high - 1)))
    assert check.answer is CANNOT_TELL
    assert words.interval(check).count("%") == 2


@pytest.mark.parametrize("metric", ["wiki/perplexity", "quiz/acc"])
def test_the_gate_and_the_report_show_one_interval(metric):
    document = report(("one", "gptq-w4a16", 0.6903, 2.0173))
    limit = "max_drop" if metric == "quiz/acc" else "max_increase_pct"
    rule = {metric: {limit: 1, "confidence": 0.95}}
    (check,) = judge(document, rules(**rule)).checks
    shown = words.interval(check)
    assert f"95% interval {shown}:" in document.candidates[0].comparison(metric).verdict
    assert f"95% interval {shown};" in check.reason


def test_the_last_line_says_that_undecided_checks_count_as_failed():
    document = report(("one", "gptq-w4a16", 0.69, 2.0))
    policy = rules(**{"quiz/acc": {"max_drop": 1, "confidence": 0.95}})
    line = words.last_line(judge(document, policy))
    assert line.startswith("fail: 1 of 1 check of 1 candidate: one")
    assert "undecided" in line
    assert "cannot_tell: fail" in line


def test_how_many_questions_would_tell():
    # Half of the answers that differ were gained and half lost: a point is ruled out in the end.
    document = report(("one", "gptq-w4a16", 0.7, 2.0))
    known = document.candidates[0].comparison("quiz/acc")
    document = changed(document, comparisons=[known.model_copy(update={"gained": 10, "lost": 10})])
    (check,) = judge(document, rules(quiz={"max_drop": 1, "confidence": 0.95})).checks
    assert check.answer is CANNOT_TELL
    low, _ = difference_interval(0.025 * check.needed, 0.025 * check.needed, check.needed)
    assert low >= -0.01
    fewer = 0.97 * check.needed
    assert difference_interval(0.025 * fewer, 0.025 * fewer, fewer)[0] < -0.01
    assert "400 were compared" in check.reason


def test_a_loss_that_is_the_limit_itself_is_never_told():
    document = ONE_CANDIDATE
    (check,) = judge(document, rules(quiz={"max_drop": 1, "confidence": 0.95})).checks
    assert (check.answer, check.needed) == (CANNOT_TELL, None)
    assert "no number of questions" in check.reason


def test_a_source_that_guesses_is_neither_passed_nor_failed():
    document = report(
        ("one", "gptq-w4a16", 0.1, 2.0), ("two", "awq-w4a16", 0.9, 2.0), source_right=0.25
    )
    for limit in ({"max_drop": 1}, {"max_drop": 50}, {"max_drop": 1, "confidence": 0.95}):
        verdict = judge(document, rules(quiz=limit))
        assert {check.answer for check in verdict.checks} == {CANNOT_TELL}
        assert "no better than guessing on quiz/acc" in verdict.checks[0].reason


@pytest.mark.parametrize(
    ("wanted", "outcome", "code"), [("fail", FAIL, 1), ("warn", PASS, 0), ("ask", CANNOT_TELL, 3)]
)
def test_what_follows_when_nothing_can_be_told(wanted, outcome, code):
    document = ONE_CANDIDATE
    limit = {"max_drop": 1, "confidence": 0.95}
    verdict = judge(document, rules(cannot_tell=wanted, quiz=limit))
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    # A failure elsewhere is a failure.
    verdict = judge(document, rules(cannot_tell=wanted, quiz=limit, kl_mean={"max": 0.01}))
    assert verdict.exit_code == 1


def test_confidence_without_paired_answers_cannot_tell(good):
    document = changed(good, comparisons=[])
    verdict = judge(document, rules(perplexity={"max_increase_pct": 90, "confidence": 0.9}))
    assert [check.answer for check in verdict.checks] == [CANNOT_TELL, PASS]
    assert "no interval of wiki/perplexity for one" in verdict.checks[0].reason


@pytest.mark.parametrize(
    "broken", [{"low": math.nan}, {"high": math.inf}, {"low": None}, {"low": 2}]
)
def test_intervals_that_make_no_sense_cannot_tell(good, broken):
    known = good.candidates[0].comparison("wiki/perplexity")
    document = changed(good, comparisons=[known.model_copy(update=broken)])
    limit = {"max_increase_pct": 1000, "confidence": 0.95}
    assert judge(document, rules(perplexity=limit)).checks[0].answer is CANNOT_TELL


# What must not pass in silence


def test_no_candidates(good):
    with pytest.raises(ScoreError, match="no candidates"):
        judge(good.model_copy(update={"candidates": []}), policy.default())


def test_two_of_one_name(good):
    with pytest.raises(ScoreError, match="two models of the report are called one"):
        judge(changed(good, 1, name="one"), policy.default())


def test_a_candidate_without_the_score(good):
    lacking = rescored(good, "quiz/acc", None)
    verdict = judge(lacking, rules(quiz={"max_drop": 50}))
    assert [check.answer for check in verdict.checks] == [FAIL, PASS]
    assert "one has no quiz/acc" in verdict.checks[0].reason
    with pytest.raises(ScoreError, match="one has no quiz/acc"):
        judge(lacking, rules(missing="error", quiz={"max_drop": 50}))
    # Where the source has it, `if_scored` excuses nobody.
    verdict = judge(lacking, rules(quiz={"max_drop": 50, "if_scored": True}))
    assert verdict.outcome is FAIL


def test_a_source_without_the_score(good):
    lacking = rescored(good, "quiz/acc", None, None)
    verdict = judge(lacking, rules(quiz={"max_drop": 50}))
    assert {check.answer for check in verdict.checks} == {FAIL}
    assert "the source has no quiz/acc" in verdict.checks[0].reason


def test_what_nobody_has_is_an_error_with_near_matches(good):
    with pytest.raises(PolicyError) as caught:
        judge(
            good,
            rules(perplexty={"max_increase_pct": 2}, quizz={"max_drop": 1}, zzz={"max": 1}),
        )
    message = str(caught.value)
    assert "unknown metric 'perplexty'. Did you mean perplexity" in message
    assert "unknown metric 'quizz'. Did you mean quiz" in message
    assert "unknown metric 'zzz'. Choose from: acc, accuracy, bits_per_weight" in message
    with pytest.raises(PolicyError, match="write wiki/perplexity"):
        judge(good, rules(wiki={"max_increase_pct": 2}))


def test_a_pattern_that_matches_nothing(good):
    with pytest.raises(PolicyError, match=r"unknown recipe 'gtpq-w4a16'. Did you mean gptq-w4a16"):
        judge(good, rules(recipes=["*", "gtpq-w4a16"], kl_mean={"max": 1}))


def test_a_candidate_that_no_rule_judges(good):
    only = {"recipes": ["gptq-*"], "kl_mean": {"max": 1}}
    with pytest.raises(PolicyError, match="no rule judges two"):
        judge(good, rules(**only))
    verdict = judge(good, rules(unjudged="warn", **only))
    assert verdict.unjudged == ("two",)
    assert words.last_line(verdict) == "pass: 1 check of 1 candidate; not judged: two"
    with pytest.raises(PolicyError, match="no rule judges one, two"):
        judge(good, rules(unjudged="warn", kl_mean={"max": 1}, **{"class": "8-bit"}))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"quiz": {"max": 0.5}}, "quiz/acc, higher is better"),
        ({"quiz": {"max_increase_pct": 5}}, "limit it by min or max_drop"),
        ({"perplexity": {"max_drop": 1}}, "wiki/perplexity, lower is better"),
        ({"kl_mean": {"min": 1}}, "limit it by max or max_increase"),
        ({"kl_mean": {"max_increase": 1, "confidence": 0.9}}, "wiki/kl_mean has no interval"),
    ],
)
def test_limits_that_would_always_hold_are_refused(good, limits, message):
    with pytest.raises(PolicyError, match=message):
        judge(good, rules(**limits))


def test_no_percentage_of_nothing(good):
    with pytest.raises(ScoreError, match="is 0, so a percentage"):
        judge(good, rules(kl_mean={"max_increase_pct": 5}))


@pytest.mark.parametrize("bad", [{"size_bytes": 0}, {"bits_per_weight": math.nan}])
def test_sizes_that_no_model_has(good, bad):
    with pytest.raises(ScoreError, match="which no model has"):
        judge(changed(good, **bad), policy.default())


def test_scores_that_are_no_numbers(good):
    score = good.candidates[0].scores["wiki/kl_mean"].model_copy(update={"value": math.nan})
    scores = {**good.candidates[0].scores, "wiki/kl_mean": score}
    with pytest.raises(ScoreError, match="wiki/kl_mean of one is nan"):
        judge(changed(good, scores=scores), policy.default())


def test_candidates_scored_otherwise(good):
    other = SETTINGS.model_copy(update={"limit": 5})
    with pytest.raises(ScoreError, match="one of the report was scored with other settings"):
        judge(changed(good, settings=other), policy.default())


# Names


def test_names_of_metrics(published):
    verdict = judge(
        published,
        rules(
            **{
                "perplexity": {"max": 100},
                "wikitext/perplexity": {"max": 100},
                "word_perplexity": {"max": 1000},
                "mmlu_stem": {"max_drop": 90},
                "mmlu_anatomy": {"max_drop": 90},
                "mmlu/acc": {"min": 0.01},
                "accuracy": {"min": 0.01},
                "kl_p99": {"max": 10},
                "bits_per_weight": {"max": 10},
            }
        ),
    )
    assert [c.metric for c in verdict.checks[:9]] == [
        "wikitext/perplexity",
        "wikitext/perplexity",
        "wikitext/word_perplexity",
        "mmlu_stem/acc",
        "mmlu_anatomy/acc",
        "mmlu/acc",
        "mmlu/acc",
        "wikitext/kl_p99",
        "bits_per_weight",
    ]


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ({"made": made(8)}, "8-bit"),
        ({"made": made(4), "bits_per_weight": 11.0}, "4-bit"),
        ({"made": made(None, "Q4_K_M"), "bits_per_weight": 9.0}, "4-bit"),
        ({"made": made(None, "IQ4_XS")}, "4-bit"),
        ({"made": made(None, "MXFP4_MOE")}, "4-bit"),
        ({"made": made(None, "Q6_K")}, "4-bit"),
        ({"made": made(None, "Q3_K_L")}, "below"),
        ({"made": made(None, "Q2_K")}, "below"),
        ({"made": made(None, "Q8_0")}, "8-bit"),
        ({"made": made(None, "BF16")}, "8-bit"),
        ({"made": None, "bits_per_weight": 9.7}, "8-bit"),
        ({"made": None, "bits_per_weight": 6.73}, "4-bit"),
        ({"made": None, "bits_per_weight": 3.9}, "below"),
    ],
)
def test_classes(good, update, expected):
    assert class_of(good.candidates[0].model_copy(update=update)) == expected


# Default policies; more of them in test_gate_default.py


def test_a_shown_drop_fails_the_default():
    document = report(("one", "gptq-w4a16", 0.6, 2.0), ("two", "awq-w4a16", 0.7, 2.0))
    verdict = judge(document, policy.default())
    assert verdict.exit_code == 1
    assert [(c.candidate, c.metric) for c in verdict.failures] == [("one", "quiz/acc")]


def test_a_report_without_text_is_not_judged_by_the_default(good):
    for place in (None, 0, 1):
        good = rescored(good, "wiki/perplexity", None, place)
    with pytest.raises(PolicyError, match=r"and \d+ more: no scored task gives a perplexity"):
        judge(good, policy.default())


def test_what_the_default_leaves_out_is_told(good):
    for place in (None, 0, 1):
        good = rescored(good, "wiki/kl_mean", None, place)
    verdict = judge(good, policy.default())
    assert any("KL mean" in note and "not judged" in note for note in verdict.notes)


# A release against the last


AGAINST = {"perplexity": {"max_increase_pct": 0.5}}


def test_the_same_report_is_no_worse(published):
    verdict = judge(published, policy.default(with_earlier=True), published)
    against = [check.answer for check in verdict.checks if check.against == "earlier"]
    assert against == [PASS] * 3 * 6


def test_a_worse_release_fails(good):
    worse = rescored(
        good, "wiki/perplexity", good.candidates[0].scores["wiki/perplexity"].value * 1.01
    )
    verdict = judge(worse, rules(against=[AGAINST]), good)
    assert [check.answer for check in verdict.checks] == [FAIL, PASS]
    assert "grew by 1.00% against the earlier report" in verdict.checks[0].reason
    assert judge(good, rules(against=[AGAINST]), worse).outcome is PASS


def test_accuracies_of_two_releases_are_told_with_care():
    limit = {"quiz": {"max_drop": 1, "confidence": 0.95}}
    old = report(("one", "gptq-w4a16", 0.7, 2.0))
    for right, expected in ((0.5, FAIL), (0.69, CANNOT_TELL)):
        new = report(("one", "gptq-w4a16", right, 2.0))
        (check,) = judge(new, rules(against=[limit]), old).checks
        assert check.answer is expected
        # Never narrower than either of the two.
        own = judge(new, rules(quiz=limit["quiz"])).checks[0]
        assert check.high - check.low > own.high - own.low


def test_earlier_reports_that_cannot_be_compared(good):
    policy_ = rules(against=[AGAINST])
    other = good.model_copy(update={"baseline": good.baseline.model_copy(update={"digest": "e"})})
    with pytest.raises(ScoreError, match="different sources"):
        judge(good, policy_, other)
    settings_ = SETTINGS.model_copy(update={"max_length": 64})
    entries = [e.model_copy(update={"settings": settings_}) for e in good.candidates]
    baseline = good.baseline.model_copy(update={"settings": settings_})
    other = good.model_copy(update={"baseline": baseline, "candidates": entries})
    with pytest.raises(ScoreError, match=r"different settings \(max_length: 128 against 64\)"):
        judge(good, policy_, other)
    with pytest.raises(PolicyError, match="no rules under `against`"):
        judge(good, rules(kl_mean={"max": 1}), good)
    with pytest.raises(PolicyError, match="give --against"):
        judge(good, policy_)


def test_a_recipe_that_the_earlier_report_lacks_fails(good):
    new = changed(good, name="three", recipe="int8-w8a8")
    verdict = judge(new, rules(against=[AGAINST]), good)
    assert [check.answer for check in verdict.checks] == [FAIL, PASS]
    assert verdict.checks[0].reason == "the earlier report has no three to compare with"
    assert "only in the earlier report: one" in verdict.notes


def test_a_renamed_folder_is_found_by_its_recipe(good):
    verdict = judge(changed(good, name="renamed"), rules(against=[AGAINST]), good)
    assert verdict.outcome is PASS


def test_rules_that_were_not_applied_are_told(good):
    verdict = judge(good, rules(kl_mean={"max": 1}, against=[AGAINST]))
    assert "rules under `against` were not applied: there is no --against" in verdict.notes
    assert "quiz was scored, but no rule judges it" in verdict.notes


# Words and files


HOSTILE = (
    "a\n::error::x|<b>]]>&\"'\x1b[31m\u202e@all #1 `c` *d* [e](https://f) ##[error] www.g.h%0A"
)


@pytest.fixture(scope="module")
def hostile(good):
    scores = {**good.baseline.scores, HOSTILE: good.baseline.scores["quiz/acc"]}
    document = good.model_copy(
        update={"baseline": good.baseline.model_copy(update={"scores": scores})}
    )
    mine = {**good.candidates[0].scores, HOSTILE: good.candidates[0].scores["quiz/acc"]}
    return changed(document, name=HOSTILE, scores=mine)


@pytest.fixture(scope="module")
def hostile_verdict(hostile):
    return judge(
        hostile, rules(cannot_tell="warn", **{HOSTILE: {"min": 0.99}, "kl_mean": {"max": 1}})
    )


def test_visible_text_is_one_line():
    assert plain(HOSTILE).isprintable()
    assert plain("Llama-3.1 8B ü 模型") == "Llama-3.1 8B ü 模型"
    assert plain("a\nb\x1b\u202e") == "a\\nb\\x1b\\u202e"


def test_junit_of_hostile_text_comes_back_as_it_was(hostile_verdict):
    text = junit.render(hostile_verdict)
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites"
    assert [s.get("name") for s in root.iter("testsuite")][:2] == [plain(HOSTILE), "two"]
    cases = list(root.iter("testcase"))
    assert cases[0].get("classname") == plain(HOSTILE)
    assert plain(HOSTILE) in cases[0].find("failure").get("message")
    assert plain(HOSTILE) in cases[0].find("failure").text


def test_junit_counts_are_those_of_its_cases(published):
    verdict = judge(
        published,
        rules(cannot_tell="warn", kl_mean={"max": 0.1}, mmlu={"max_drop": 1, "confidence": 0.9}),
    )
    root = ElementTree.fromstring(junit.render(verdict))
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("12", "3", "6")
    for suite in root.iter("testsuite"):
        assert suite.get("tests") == "2"
        assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
        assert int(suite.get("skipped")) == len(suite.findall("testcase/skipped"))
    kinds = {"fail": "failure", "warn": "skipped", "ask": "error"}
    for wanted, kind in kinds.items():
        other = Verdict(verdict.of(CANNOT_TELL), wanted)
        root = ElementTree.fromstring(junit.render(other))
        assert len(list(root.iter(kind))) == 6


def test_junit_of_an_error():
    root = ElementTree.fromstring(junit.render_error(f"first\n  {HOSTILE}"))
    error = root.find("testsuite/testcase/error")
    assert (error.get("message"), root.get("errors")) == ("first", "1")


def test_markdown_of_hostile_text_has_no_markup(hostile_verdict):
    text = markdown.render(hostile_verdict)
    assert "\x1b" not in text
    for piece in ("<b>", "[e]", "`c`", "*d*", "@all", "https://", "www.g", "x|", " #1"):
        assert piece not in text, piece
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4
    assert {line.count("|") for line in table} == {6}


def test_long_markdown_is_cut_and_says_so(hostile_verdict):
    failing, *rest = hostile_verdict.checks
    many = Verdict((*[rest[0]] * 5000, failing), "fail")
    text = markdown.render(many)
    assert len(text) <= 65_536
    assert "more checks are not shown" in text
    assert "**fail**" in text
    many = Verdict((failing,) * 5000, "fail")
    assert len(markdown.render(many)) <= 65_536


def test_annotations_are_one_line_each_and_escaped(hostile_verdict):
    lines = list(github.annotations(hostile_verdict))
    assert len(lines) == 2 + 1
    for line in lines:
        assert "\n" not in line
        assert line.startswith(
            ("::error title=quantkit gate%3A ", "::notice title=quantkit gate::")
        )
        head = line.removeprefix("::").partition("::")[0]
        assert head.count(":") == 0
        assert "," not in head
    assert "%250A" in lines[0]


def test_annotations_are_no_more_than_github_shows(hostile_verdict):
    failing = hostile_verdict.checks[0]
    checks = tuple(replace(failing, reason=f"{n} is too much") for n in range(50))
    lines = list(github.annotations(Verdict(checks, "fail")))
    assert len([line for line in lines if line.startswith("::error")]) == 10
    assert "and 41 more" in lines[9]


def test_a_reason_that_several_share_is_said_once(good):
    check = judge(good, rules(perplexity={"max": 0.001})).checks[0]
    shared = "the source itself does no better than guessing on quiz/acc"
    checks = tuple(replace(check, candidate=f"c{n}", reason=shared) for n in range(4))
    verdict = Verdict(checks, "fail")
    assert words.reasons(checks) == [("c0, c1, c2, c3", shared)]
    assert markdown.render(verdict).count(shared) == 1
    assert "".join(github.annotations(verdict)).count(shared) == 1


def test_a_limit_on_a_drop_reads_as_one(good):
    check = judge(good, rules(accuracy={"max_drop": 1.0})).checks[0]
    assert words.limit(check) == "at most 1 point lower"
    assert words.short_limit(check) == "≥ -1"


def test_numbers_are_shown_apart_from_their_limit(good):
    check = judge(
        rescored(good, "wiki/kl_mean", 0.0500000001), rules(kl_mean={"max": 0.05})
    ).checks[0]
    assert check.answer is FAIL
    assert words.amount(check) == "0.0500000001 nats"
    assert words.limit(check) == "at most 0.05 nats"
    assert words.short_limit(check) == "≤ 0.05"
    document = rescored(good, "wiki/perplexity", 10.0, None)
    document = rescored(document, "wiki/perplexity", 10.200001)
    check = judge(document, rules(perplexity={"max_increase_pct": 2})).checks[0]
    assert words.amount(check) == "+2.00001%"
    assert words.short_limit(check) == "≤ +2%"


def test_no_change_is_shown_without_a_sign():
    document = paired(0, 0, 1.0)
    check = judge(document, rules(quiz={"max_drop": 3})).checks[0]
    assert words.amount(check) == "0.0 points"
    assert "unchanged" in check.reason
    assert "-" not in check.reason


def test_broken_figures_are_told_in_few_digits(good):
    document = rescored(good, "wiki/perplexity", 1e304)
    check = judge(document, rules(perplexity={"max_increase_pct": 2})).checks[0]
    assert check.answer is FAIL
    assert len(check.reason) < 150


def test_verdicts_are_json(hostile_verdict, published):
    import json

    data = json.loads(json.dumps(hostile_verdict.to_json(), allow_nan=False))
    assert data["checks"][0]["candidate"] == HOSTILE
    assert (data["outcome"], data["exit_code"]) == ("fail", 1)
    limits = {"perplexity": {"max_increase_pct": 2}}
    verdict = judge(rescored(published, "wikitext/perplexity", 1e308), rules(**limits))
    json.dumps(verdict.to_json(), allow_nan=False)


def test_the_last_line(good):
    assert words.last_line(judge(good, rules(kl_mean={"max": 1}))) == (
        "pass: 2 checks of 2 candidates"
    )
    assert words.last_line(judge(good, rules(kl_mean={"max": 0.01}))) == (
        "fail: 2 of 2 checks of 2 candidates: one, two"
    )


def test_cards_of_this_test_are_comparable():
    assert card("src").digest == card("x", "gptq-w4a16").source_fingerprint


def test_a_drop_without_an_interval_fails_by_itself(good):
    document = changed(rescored(good, "quiz/acc", 0.0, 0), comparisons=[])
    (first, _) = judge(document, rules(quiz={"max_drop": 1, "confidence": 0.95})).checks
    assert first.answer is FAIL


def test_scores_and_answers_that_contradict_each_other_are_no_pass(good):
    document = rescored(good, "quiz/acc", 0.0, 0)
    with pytest.raises(ScoreError, match="contradict each other"):
        judge(document, rules(quiz={"max_drop": 30, "confidence": 0.95}))


def told_how(document, place, **facts):
    """The report with something known of how one candidate was made."""
    entry = document.candidates[place]
    known = (entry.made or made()).model_copy(update=facts)
    entries = list(document.candidates)
    entries[place] = entry.model_copy(update={"made": known})
    return document.model_copy(update={"candidates": entries})


def layers_of(errors):
    return {f"model.layers.{i}.mlp.up_proj": LayerError(weight=e) for i, e in enumerate(errors)}


def test_a_layer_that_stands_out_fails_whatever_is_known_of_others(good):
    document = told_how(good, 0, layers=layers_of([0.1, 0.1, 0.9, 0.1]))
    verdict = judge(document, rules(unjudged="warn", layer_outlier={"max": 3}))
    (check,) = verdict.failures
    assert check.amount == pytest.approx(9)
    assert "up_proj of block 2 stands out" in check.reason
    assert "over the median" in check.reason


@pytest.mark.parametrize(
    "errors", [[0.0, 0.0, 0.9, 0.0], [0.1, 0.9], [0.1, math.nan, 0.1]], ids=["none", "two", "nan"]
)
def test_no_damaged_layer_hides(good, errors):
    verdict = judge(
        told_how(good, 0, layers=layers_of(errors)),
        rules(unjudged="warn", layer_outlier={"max": 3}),
    )
    assert verdict.outcome is FAIL


def test_bounded_figures_have_the_units_of_the_report():
    document = rescored(ONE_CANDIDATE, "wiki/top1_agreement", 0.28)
    document = rescored(document, "wiki/kl_mean", 0.006)
    policy = rules(top1_agreement={"min": 0.29}, kl_mean={"max": 0.05}, size_ratio={"max": 0.9})
    agreement, kl, size = judge(document, policy).checks[:3]
    assert (words.amount(agreement), words.short_limit(agreement)) == ("28.0%", "≥ 29%")
    assert "28.0%" in agreement.reason
    assert "29%" in agreement.reason
    assert (words.amount(kl), words.short_limit(kl)) == ("0.0060 nats", "≤ 0.05")
    ratio = document.candidates[0].size_bytes / document.baseline.size_bytes
    assert (words.amount(size), words.short_limit(size)) == (f"{ratio:.1%}", "≤ 90%")


@pytest.mark.parametrize(("value", "limit"), [(0.6873, 1.28), (0.6871, 1.28), (0.6875, 1.2)])
def test_points_have_the_digits_of_the_report_unless_they_would_cross_the_limit(value, limit):
    document = rescored(ONE_CANDIDATE, "quiz/acc", 0.7, None)
    document = rescored(document, "quiz/acc", value)
    check = judge(document, rules(quiz={"max_drop": limit})).checks[0]
    shown = float(words.amount(check).split()[0])
    assert (shown >= -limit) is (check.answer is PASS)
    wide = judge(document, rules(quiz={"max_drop": 9})).checks[0]
    assert words.amount(wide) == f"{metrics.points(value - 0.7)} points"
    assert metrics.shown("quiz/acc", value) in wide.reason


def test_percent_that_misses_by_a_hair_does_not_read_as_its_limit():
    document = rescored(ONE_CANDIDATE, "wiki/top1_agreement", 0.8999999)
    check = judge(document, rules(top1_agreement={"min": 0.9})).checks[0]
    assert check.answer is FAIL
    assert words.amount(check) != words.short_limit(check).removeprefix("≥ ")
    assert float(words.amount(check).rstrip("%")) < 90
