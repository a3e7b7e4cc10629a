import json
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from quantkit.errors import ScoreError
from quantkit.metrics import points
from quantkit.scoring import paired
from quantkit.scoring.paired import (
    AccuracyChange,
    PerplexityChange,
    compare_accuracies,
    compare_perplexity,
    difference_interval,
    holm,
    mcnemar,
    questions_needed,
)
from quantkit.scoring.verdict import most_points, points_interval, verdict

N_DRAWS = 1000
SMOOTHER = ((20, 1.0), (200, 1.5))


def compare_accuracy(source, candidate):
    (change,) = compare_accuracies(source, [candidate])
    return change


unhurried = settings(deadline=None, max_examples=60)
pairs_of_answers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
changes_per_token = st.floats(1e-6, 0.2) | st.floats(-0.2, -1e-6)
documents = st.lists(
    st.tuples(st.floats(1, 1e4), changes_per_token, st.integers(1, 4000)),
    min_size=2,
    max_size=40,
    unique_by=lambda document: document[0],
)


def accuracy(n: int, lost: int, gained: int) -> AccuracyChange:
    source, candidate = np.zeros(n, int), np.zeros(n, int)
    source[:lost] = 1
    candidate[lost : lost + gained] = 1
    return compare_accuracy(source, candidate)


def perplexity(documents: list[tuple[float, float, int]], swap: bool = False) -> PerplexityChange:
    source, change, tokens = np.array(documents).T
    models = (source, source + change * tokens)
    return compare_perplexity(*models[:: -1 if swap else 1], tokens, draws=500)


# Accuracy


def test_accuracy_counts_what_was_gained_and_lost():
    change = compare_accuracy([1, 1, 1, 0, 0, True], [1, 0, 0, 1, 0, False])
    assert (change.n_questions, change.gained, change.lost) == (6, 1, 3)
    assert change.difference == pytest.approx(-2 / 6)
    assert change.discordant == pytest.approx(4 / 6)


@pytest.mark.parametrize("total", [0, 1, 2, 5, 6, 37, 400, 5001])
def test_mcnemar_is_the_exact_binomial_test(total):
    for lost in {0, 1, total // 3, total // 2, total} & set(range(total + 1)):
        expected = stats.binomtest(lost, total).pvalue if total else 1.0
        assert mcnemar(total - lost, lost) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_interval_equals_the_published_one():
    # Airway data of Bentur et al. (2009), as given by Fagerland, Lydersen and Laake (2014).
    low, high = difference_interval(1, 7, 21)
    assert (round(float(low), 3), round(float(high), 3)) == (-0.517, -0.026)


def test_interval_without_discordant_pairs_has_its_closed_form():
    z2 = stats.norm.ppf(0.975) ** 2
    low, high = difference_interval(0, 0, [1, 50, 14042])
    assert high == pytest.approx(z2 / (np.array([1, 50, 14042]) + z2))
    assert low == pytest.approx(-high)


def test_ends_of_the_interval_are_where_a_score_test_turns():
    # The likeliest table with a given difference, found by brute force instead of the formula.
    gained, lost, n = 3, 11, 60
    for end in difference_interval(gained, lost, n):
        losses = np.linspace(max(0, -end), (1 - end) / 2, 400_001)[1:-1]
        gains = losses + end
        likelihood = gained * np.log(gains) + lost * np.log(losses)
        likelihood += (n - gained - lost) * np.log1p(-gains - losses)
        best = np.argmax(likelihood)
        variance = n * (gains[best] + losses[best] - end**2)
        assert abs(gained - lost - n * end) / math.sqrt(variance) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize("n", [20, 50, 500])
@pytest.mark.parametrize("discordant", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("share_lost", [0.5, 0.8])
def test_interval_covers_the_truth(n, discordant, share_lost):
    losing, gaining = discordant * share_lost, discordant * (1 - share_lost)
    rng = np.random.default_rng(n)
    lost, gained, _ = rng.multinomial(n, (losing, gaining, 1 - discordant), 20_000).T
    low, high = difference_interval(gained, lost, n)
    covered = np.mean((low <= gaining - losing) & (gaining - losing <= high))
    assert covered >= 0.935
    error = np.sqrt((gained + lost) / n - ((gained - lost) / n) ** 2) / math.sqrt(n)
    usual = np.mean(np.abs((gained - lost) / n - (gaining - losing)) <= 1.96 * error)
    assert covered >= usual - 0.01


@unhurried
@given(pairs_of_answers, st.randoms())
def test_accuracy_does_not_depend_on_the_order_of_questions(pairs, random):
    shuffled = zip(*random.sample(pairs, len(pairs)), strict=True)
    assert compare_accuracy(*zip(*pairs, strict=True)) == compare_accuracy(*shuffled)


@unhurried
@given(pairs_of_answers)
def test_swapping_models_flips_the_sign_of_a_change_in_accuracy(pairs):
    source, candidate = zip(*pairs, strict=True)
    there, back = compare_accuracy(source, candidate), compare_accuracy(candidate, source)
    assert back.difference == -there.difference
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-9)
    assert back.p_value == there.p_value


@unhurried
@given(pairs_of_answers)
def test_interval_of_accuracy_contains_the_estimate(pairs):
    change = compare_accuracy(*zip(*pairs, strict=True))
    assert -1 <= change.low <= change.difference <= change.high <= 1
    assert 0 < change.p_value <= 1


def test_a_real_change_always_has_an_interval_without_zero():
    for total in range(6, 2000, 7):
        fewer = int(stats.binom.ppf(0.025, total, 0.5)) - 1
        fewer += mcnemar(fewer + 1, total - fewer - 1) < paired.ALPHA
        assert mcnemar(fewer, total - fewer) < paired.ALPHA <= mcnemar(fewer + 1, total - fewer - 1)
        assert difference_interval(fewer, total - fewer, 3000)[1] < 0


# How many questions


@pytest.mark.parametrize("discordant", [0.0, 0.01, 0.08, 0.5, 1.0])
@pytest.mark.parametrize("half_width", [0.005, 0.01, 0.05])
def test_questions_needed_are_just_enough(discordant, half_width):
    needed = questions_needed(discordant, half_width)
    for n, is_enough in ((needed, True), (needed - 1, False)):
        low, high = difference_interval(discordant * n / 2, discordant * n / 2, n)
        assert bool((high - low) / 2 <= half_width) is is_enough


def test_balanced_gains_and_losses_are_the_widest_case():
    for share in np.linspace(0, 1, 21):
        low, high = difference_interval(200 * share, 200 * (1 - share), 1000)
        balanced = difference_interval(100, 100, 1000)
        assert high - low <= balanced[1] - balanced[0] + 1e-9


@pytest.mark.parametrize("arguments", [(-0.1, 0.01), (1.1, 0.01), (0.1, 0.0), (0.1, 1.0)])
def test_impossible_wishes_are_refused(arguments):
    with pytest.raises(ScoreError):
        questions_needed(*arguments)


# Perplexity


def sample(rng: np.random.Generator, n: int, spread: float = 1.0) -> tuple[np.ndarray, ...]:
    """Documents of skewed lengths, read by two models that are equally good."""
    tokens = np.ceil(np.exp(rng.normal(6, spread, n)))
    source = tokens * rng.normal(2.5, 0.3, n)
    change = tokens * rng.normal(0, 0.01, n) + np.sqrt(tokens) * rng.normal(0, 0.2, n)
    return source, source + change, tokens


def test_ratio_of_perplexities_is_that_of_all_tokens_together():
    source, candidate, tokens = sample(np.random.default_rng(0), 30)
    change = compare_perplexity(source, candidate, tokens)
    expected = math.exp(candidate.sum() / tokens.sum()) / math.exp(source.sum() / tokens.sum())
    assert change.ratio == pytest.approx(expected, rel=1e-12)
    assert (change.n_documents, change.n_tokens) == (30, tokens.sum())


def test_interval_of_perplexity_agrees_with_scipy_where_both_are_good():
    rng = np.random.default_rng(0)
    source, candidate, tokens = sample(rng, 400, spread=0.5)

    def log_ratio(change: np.ndarray, tokens: np.ndarray, axis: int) -> np.ndarray:
        return change.sum(axis=axis) / tokens.sum(axis=axis)

    theirs = stats.bootstrap(
        (candidate - source, tokens), log_ratio, paired=True, n_resamples=4000, batch=500, rng=rng
    ).confidence_interval
    ours = compare_perplexity(source, candidate, tokens)
    width = theirs.high - theirs.low
    assert math.log(ours.low) == pytest.approx(theirs.low, abs=0.07 * width)
    assert math.log(ours.high) == pytest.approx(theirs.high, abs=0.07 * width)


def test_equal_lengths_make_it_a_paired_t_test():
    rng = np.random.default_rng(0)
    change = rng.normal(0.005, 0.02, 60)
    ours = compare_perplexity(np.full(60, 250.0), 250 + 100 * change, np.full(60, 100))
    theirs = stats.ttest_1samp(change, 0)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=0.3)
    low, high = theirs.confidence_interval()
    assert (math.log(ours.low), math.log(ours.high)) == pytest.approx((low, high), rel=0.1)


def test_draws_are_seeded_and_do_not_depend_on_memory(monkeypatch):
    models = sample(np.random.default_rng(0), 40)
    once = compare_perplexity(*models)
    assert compare_perplexity(*models) == once
    assert compare_perplexity(*models, seed=1).ratio == once.ratio
    monkeypatch.setattr(paired, "PICKS_AT_ONCE", 4000)
    assert compare_perplexity(*models).low == pytest.approx(once.low, rel=1e-3)


@unhurried
@given(documents, st.randoms())
def test_perplexity_does_not_depend_on_the_order_of_documents(documents, random):
    assert perplexity(documents) == perplexity(random.sample(documents, len(documents)))


@unhurried
@given(documents)
def test_swapping_models_inverts_the_ratio(documents):
    there, back = perplexity(documents), perplexity(documents, swap=True)
    assert back.ratio == pytest.approx(1 / there.ratio)
    assert back.p_value == pytest.approx(there.p_value, abs=0.01)
    if there.low is not None:
        assert (back.low, back.high) == pytest.approx((1 / there.high, 1 / there.low))


@unhurried
@given(documents)
def test_interval_of_perplexity_contains_the_estimate(documents):
    change = perplexity(documents)
    assert 0 < change.p_value <= 1
    if len(documents) < paired.MIN_DOCUMENTS:
        assert change.low is None
        assert change.high is None
    else:
        assert change.low <= change.ratio <= change.high


def test_documents_without_tokens_say_nothing():
    source, candidate, tokens = sample(np.random.default_rng(0), 20)
    padded = [np.append(values, [0, 0]) for values in (source, candidate, tokens)]
    assert compare_perplexity(*padded) == compare_perplexity(source, candidate, tokens)


@pytest.mark.parametrize(("loss", "told"), [(0.01, "a real loss"), (900.0, "a broken model")])
def test_the_same_loss_on_every_token_is_certain(loss, told):
    tokens = np.arange(100, 130)
    change = compare_perplexity(2.5 * tokens, (2.5 + loss) * tokens, tokens)
    assert change.p_value < 0.001
    assert change.low == pytest.approx(change.high)
    assert told in verdict(change)
    json.dumps(change.to_json(), allow_nan=False)


# Both


@pytest.mark.parametrize(
    ("source", "candidate"),
    [([], []), ([1, 0], [1]), ([1, 0.5], [1, 0]), ([1, math.nan], [1, 0]), ([[1]], [[0]])],
)
def test_answers_that_cannot_be_compared_are_refused(source, candidate):
    with pytest.raises(ScoreError):
        compare_accuracy(source, candidate)


@pytest.mark.parametrize(
    ("source", "candidate", "tokens"),
    [
        ([], [], []),
        ([1, 2], [1, 2], [3]),
        ([1], [math.inf], [3]),
        ([1], [1], [-1]),
        ([1], [1], [0]),
    ],
)
def test_documents_that_cannot_be_compared_are_refused(source, candidate, tokens):
    with pytest.raises(ScoreError):
        compare_perplexity(source, candidate, tokens)


def test_results_are_plain_and_groups_are_parts_of_the_arrays():
    rng = np.random.default_rng(0)
    answers = rng.integers(0, 2, (2, 300))
    subject = rng.integers(0, 3, 300)
    parts = [compare_accuracy(*answers[:, subject == group]) for group in range(3)]
    whole = compare_accuracy(*answers)
    assert sum(part.gained for part in parts) == whole.gained
    assert AccuracyChange(**json.loads(json.dumps(whole.to_json(), allow_nan=False))) == whole
    change = compare_perplexity(*sample(rng, 10))
    assert PerplexityChange(**json.loads(json.dumps(change.to_json(), allow_nan=False))) == change


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_keeps_the_order_and_lies_between_nothing_and_bonferroni(p_values):
    adjusted = holm(p_values)
    for p, a in zip(p_values, adjusted, strict=True):
        assert p <= a <= min(1, len(p_values) * p)
        assert all(a <= b for q, b in zip(p_values, adjusted, strict=True) if p < q)


# How often chance is taken for a loss


@pytest.mark.parametrize("n", [50, 500])
@pytest.mark.parametrize("discordant", [0.02, 0.1, 0.4])
def test_chance_is_rarely_called_a_loss_of_accuracy(n, discordant):
    rng = np.random.default_rng(7)
    shares = (discordant / 2, discordant / 2, 1 - discordant)
    p_of = cache(mcnemar)
    counts = rng.multinomial(n, shares, N_DRAWS).tolist()
    real = [(lost, gained) for lost, gained, _ in counts if p_of(gained, lost) < paired.ALPHA]
    told = [verdict(accuracy(n, *pair)) for pair in real]
    assert sum("a real loss" in text for text in told) <= 0.05 * N_DRAWS


@pytest.mark.parametrize(
    ("n", "spread"),
    [(20, 1.5), (200, 1.0), *(pytest.param(*c, marks=pytest.mark.slow) for c in SMOOTHER)],
)
def test_chance_is_rarely_called_a_loss_of_perplexity(n, spread):
    rng = np.random.default_rng(7)
    changes = [compare_perplexity(*sample(rng, n, spread), draws=500) for _ in range(N_DRAWS)]
    real = [change for change in changes if change.p_value < paired.ALPHA]
    assert sum("a real loss" in verdict(change) for change in real) <= 0.05 * N_DRAWS
    covered = sum(change.low <= 1 <= change.high for change in changes)
    assert covered >= 0.935 * N_DRAWS


def test_among_ten_candidates_chance_is_rarely_called_a_loss_of_accuracy():
    rng = np.random.default_rng(7)
    p_of = cache(mcnemar)
    wrong = 0
    for _ in range(N_DRAWS):
        lost, gained, _ = rng.multinomial(500, (0.05, 0.05, 0.9), 10).T.tolist()
        p_values = [p_of(*counts) for counts in zip(gained, lost, strict=True)]
        worst = min(range(10), key=lambda i: (holm(p_values)[i], gained[i] - lost[i]))
        if holm(p_values)[worst] < 0.05:
            change = accuracy(500, lost[worst], gained[worst])
            wrong += "a real loss" in verdict(change, holm(p_values)[worst])
    assert wrong <= 0.05 * N_DRAWS


def test_among_ten_candidates_chance_is_rarely_called_a_loss_of_perplexity():
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(100):
        changes = [compare_perplexity(*sample(rng, 20), draws=500) for _ in range(10)]
        adjusted = holm([change.p_value for change in changes])
        told = [verdict(*pair) for pair in zip(changes, adjusted, strict=True)]
        wrong += any("a real loss" in text for text in told)
    assert wrong <= 0.05 * 100


# Words


@pytest.mark.parametrize(
    ("n", "lost", "gained", "text"),
    [
        (
            14042,
            600,
            550,
            "0.4 points lower, 95% interval -0.9 to +0.2: no evidence of a loss with 14,042 "
            "questions; a loss above 0.9 points is ruled out",
        ),
        (14042, 900, 590, "2.2 points lower, 95% interval -2.8 to -1.6: a real loss (p < 0.0001)"),
        (500, 15, 3, "2.4 points lower, 95% interval -4.4 to -0.8: a real loss (p = 0.008)"),
        (500, 3, 15, "2.4 points higher, 95% interval +0.8 to +4.4: a real gain (p = 0.008)"),
        (
            14042,
            0,
            0,
            "right and wrong on the same questions, 95% interval -0.03 to +0.03: no evidence of a "
            "loss with 14,042 questions; a loss above 0.03 points is ruled out",
        ),
        (
            50,
            0,
            0,
            "right and wrong on the same questions, 95% interval -7.2 to +7.2: too few questions "
            "(50) to tell; a loss of up to 7.2 points cannot be ruled out",
        ),
        (
            50,
            3,
            2,
            "2.0 points lower, 95% interval -13.1 to +8.6: too few questions (50) to tell; "
            "a loss of up to 13.1 points cannot be ruled out",
        ),
        (
            4000,
            40,
            40,
            "no difference, 95% interval -0.5 to +0.5: no evidence of a loss with 4,000 questions; "
            "a loss above 0.5 points is ruled out",
        ),
        (
            50,
            5,
            0,
            "10.0 points lower, 95% interval -21.4 to -2.1: a loss is possible but not shown "
            "(p = 0.062); a loss of up to 21.4 points cannot be ruled out",
        ),
    ],
)
def test_verdicts_on_accuracy(n, lost, gained, text):
    assert verdict(accuracy(n, lost, gained)) == text


def test_the_adjusted_p_value_decides():
    change = accuracy(500, 15, 3)
    assert verdict(change, 0.03).endswith(": a real loss (adjusted p = 0.030)")
    assert verdict(change, 0.0499).endswith(": a real loss (adjusted p = 0.0499)")
    not_shown = "is possible but not shown (adjusted p = 0.120)"
    limit = "; a loss above 4.4 points is ruled out"
    assert verdict(change, 0.12).endswith(f": a loss {not_shown}{limit}")
    assert verdict(accuracy(500, 3, 15), 0.12).endswith(f": a gain {not_shown}")


@pytest.mark.parametrize(
    ("ratio", "low", "high", "p", "text"),
    [
        (
            1.0052,
            1.0031,
            1.0074,
            0.0003,
            "0.52% higher, 95% interval +0.31% to +0.74%: a real loss (p = 0.0003)",
        ),
        (
            0.9985,
            0.9975,
            0.9996,
            0.004,
            "0.15% lower, 95% interval -0.25% to -0.04%: a real gain (p = 0.004)",
        ),
        (
            1.0007,
            0.9966,
            1.0054,
            0.74,
            "0.07% higher, 95% interval -0.34% to +0.54%: no evidence of a loss with 62 documents; "
            "a loss above 0.54% is ruled out",
        ),
        (
            1.01,
            0.97,
            1.05,
            0.6,
            "1.00% higher, 95% interval -3.00% to +5.00%: too few documents (62) to tell; "
            "a loss of up to 5.00% cannot be ruled out",
        ),
        (1.028, None, None, 1.0, "2.80% higher: too few documents (62) to tell"),
        (1.3, 0.1, 1e30, 0.4, "30.00% higher: too few documents (62) to tell"),
        (1e300, 1e200, 1e304, 0.0002, "more than 100 times as high: a broken model"),
        (1.0, 1.0, 1.0, 1.0, "the same on all 62 documents: no loss"),
    ],
)
def test_verdicts_on_perplexity(ratio, low, high, p, text):
    assert verdict(PerplexityChange(62, 90_000, ratio, low, high, p)) == text


@unhurried
@given(st.floats(-0.3, 0.3), st.floats(0, 0.3), st.floats(0, 0.3), st.floats(1e-6, 1))
def test_what_is_called_ruled_out_lies_outside_the_interval(shift, below, above, p):
    change = AccuracyChange(1000, 10, 10, shift, shift - below, shift + above, p)
    text = verdict(change)
    if "ruled out" in text and "a loss above " in text:
        loss = float(text.split("a loss above ")[1].split()[0])
        assert loss / 100 >= -change.low - 1e-9
    assert "-0.0 points" not in text


def test_one_change_in_points_has_one_figure_everywhere():
    change = compare_accuracy([1] * 280 + [0] * 120, [1] * 277 + [0] * 123)
    assert points(0.6925 - 0.7) == points(change.difference) == "-0.8"
    assert verdict(change).startswith("0.8 points lower")
    ends = points_interval(change.low, change.high)
    assert ends.startswith(f"-{most_points(change.low)} to")
    assert points(-1e-18) == "+0.0"
