"""Bounds on what was lost, at any confidence: against scipy, and by how often they hold."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from quantkit.report.document import Comparison
from quantkit.scoring import bounds
from quantkit.scoring.paired import CONFIDENCES, compare_perplexity
from quantkit.scoring.scorecard import Score

N_SAMPLES = 600


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 19, 61, 1000])
@pytest.mark.parametrize("confidence", [0.6, 0.95, 0.99, 0.999])
def test_student_is_scipys(degrees, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, degrees)
    assert bounds.student(confidence, degrees) == pytest.approx(expected, rel=1e-9)


def sample(rng, n, spread):
    """Documents of skewed lengths, whose loss changes by nothing on average."""
    tokens = np.ceil(np.exp(rng.normal(6, spread, n)))
    change = tokens * rng.normal(0, 0.01, n) + np.sqrt(tokens) * rng.normal(0, 0.2, n)
    source = 2.5 * tokens
    return compare_perplexity(source, source + change, tokens, draws=1000)


def as_stored(change, **update):
    """As a report keeps it."""
    known = {"score": "x/perplexity", "adjusted_p": 1.0, "verdict": "", **change.to_json()}
    return Comparison.model_validate(known | update)


def interval(comparison, confidence):
    from quantkit.gating.intervals import of_change

    return of_change(comparison, confidence)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(3)
    return [sample(rng, 8, 1.0) for _ in range(N_SAMPLES)]


@pytest.mark.parametrize("confidence", [0.8, 0.99])
def test_intervals_hold_as_often_as_they_say(samples, confidence):
    """With eight uneven documents, where normal quantiles are far off."""
    ends = [interval(as_stored(change), confidence) for change in samples]
    covered = np.mean([low <= 1 <= high for low, high in ends])
    error = math.sqrt(confidence * (1 - confidence) / N_SAMPLES)
    assert covered >= confidence - error


def test_reports_of_old_err_on_the_safe_side(samples):
    for confidence in (0.8, 0.99):
        ends = [interval(as_stored(change, intervals={}), confidence) for change in samples]
        covered = np.mean([low <= 1 <= high for low, high in ends])
        error = math.sqrt(confidence * (1 - confidence) / N_SAMPLES)
        assert covered >= confidence - 2 * error
    rescaled = stats.norm.ppf(0.995) / stats.norm.ppf(0.975)
    narrower = []
    for change in samples:
        low, high = interval(as_stored(change, intervals={}), 0.99)
        middle, usual = math.log(change.ratio), (math.log(change.low), math.log(change.high))
        assert math.log(low) <= middle + rescaled * (usual[0] - middle)
        assert math.log(high) >= middle + rescaled * (usual[1] - middle)
        narrower.append(
            middle + rescaled * (usual[0] - middle) > math.log(change.intervals["0.99"][0])
        )
    # What was wrong with rescaling: it is narrower than the interval that holds.
    assert np.mean(narrower) > 0.9


def test_kept_intervals_are_nested_and_the_usual_one_is_among_them(samples):
    change = samples[0]
    ends = [change.intervals[f"{confidence:g}"] for confidence in CONFIDENCES]
    assert change.intervals["0.95"] == [change.low, change.high]
    for (low, high), (lower, higher) in pairwise(ends):
        assert lower <= low <= high <= higher


def test_a_confidence_between_two_kept_ones_takes_the_higher(samples):
    comparison = as_stored(samples[0])
    assert interval(comparison, 0.96) == pytest.approx(tuple(comparison.intervals["0.975"]))
    assert interval(comparison, 0.95) == pytest.approx((comparison.low, comparison.high))
    assert interval(comparison, 0.9999) is None


def test_what_was_kept_must_make_sense(samples):
    comparison = as_stored(samples[0])
    for broken in ([2.0, 3.0], [math.nan, 2.0], [0.5], [0.5, math.inf]):
        assert interval(comparison.model_copy(update={"intervals": {"0.99": broken}}), 0.99) is None


@pytest.mark.parametrize(("share", "n"), [(0.65, 200), (0.3, 1000), (1.0, 50), (0.98, 120)])
def test_bounds_of_separate_accuracies_hold(share, n):
    """Answers of one model, twice and independently: the widest case."""
    rng = np.random.default_rng(5)
    counts = rng.binomial(n, share, (3000, 2)) / n
    covered = 0
    for first, second in counts:
        before, after = (Score(value=v, stderr=None, n=n) for v in (first, second))
        low, high = bounds.of_separate_accuracies(before, after, 0.95)
        covered += low <= 0 <= high
        assert low <= second - first <= high
        assert high > low
    assert covered / 3000 >= 0.94


def test_bounds_of_separate_perplexities_are_wider_than_paired_ones():
    rng = np.random.default_rng(1)
    tokens = np.full(40, 300.0)
    source = tokens * rng.normal(2.5, 0.3, 40)
    after = source + tokens * rng.normal(0.01, 0.01, 40)
    from quantkit.scoring.harness import ratio

    scores = []
    for losses in (source, after):
        mean, error = ratio(losses.tolist(), tokens.tolist())
        scores.append(Score(value=math.exp(mean), stderr=math.exp(mean) * error, n=12_000))
    low, high = bounds.of_separate_perplexities(*scores, 40, 0.95)
    paired = compare_perplexity(source, after, tokens)
    assert low < paired.low < paired.high < high
    assert bounds.of_separate_perplexities(*scores, None, 0.95)[1] > high
    bare = [score.model_copy(update={"stderr": None}) for score in scores]
    assert bounds.of_separate_perplexities(*bare, 40, 0.95) is None
