"""A chosen set stands for its pool better than chance, by figures that mean what they say."""

import re
from functools import cache

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import ks_2samp

from quantkit.calibration.choosing import figures, selection
from quantkit.calibration.choosing.candidates import Candidates
from quantkit.calibration.choosing.figures import BETTER_HIGH, Figures
from quantkit.calibration.choosing.packing import Part
from quantkit.calibration.choosing.selection import Shape
from quantkit.calibration.rendering import Piece
from quantkit.errors import DataError

TOPICS, OWN, SHARED = 12, 30, 40
VOCABULARY = TOPICS * OWN + SHARED


def piece(rng, topic, n_tokens):
    """Tokens of one topic among tokens that all topics have."""
    own = topic * OWN + rng.integers(0, OWN, n_tokens)
    shared = TOPICS * OWN + rng.zipf(1.6, n_tokens) % SHARED
    return Piece(np.where(rng.random(n_tokens) < 0.6, own, shared).astype(np.int32), False)


@cache
def pool(seed, n=1500, length=128, shares=(0.6, 0.4), mean=40):
    rng = np.random.default_rng(seed)
    topics = rng.integers(0, TOPICS, n)
    sizes = np.clip(rng.lognormal(np.log(mean), 0.6, n), 3, length).astype(int)
    pieces = [piece(rng, t, size) for t, size in zip(topics, sizes, strict=True)]
    # More rows than its share says come from the first, as in life.
    source = (rng.random(n) < 0.3).astype(int) if len(shares) == 2 else np.zeros(n, int)
    return Candidates(pieces, source, np.array(shares), VOCABULARY, seed)


def tokens_by_source(candidates, samples):
    given = np.zeros(len(candidates.shares))
    for sample in samples:
        for part in sample:
            given[candidates.source[part.piece]] += part.n_tokens
    return given


def compared(candidates, shape):
    """A chosen set's figures, and the mean of random ones."""
    choice = selection.cover(candidates, shape)
    assert len(choice.samples) == shape.n_samples
    clusters = (choice.clusters, choice.n_clusters)
    draws = [selection.at_random(candidates, shape, i) for i in range(20)]
    theirs = figures.mean([figures.measure(candidates, d, *clusters) for d in draws])
    return figures.measure(candidates, choice.samples, *clusters), theirs


@pytest.mark.parametrize("packs", [True, False], ids=["pack", "pad"])
@pytest.mark.parametrize("n_samples", [64, 128])
def test_chosen_sets_beat_random_ones_in_every_figure(n_samples, packs):
    found = [compared(pool(seed), Shape(n_samples, 128, packs)) for seed in range(3)]
    for ours, theirs in found:
        assert ours.token_distance < 0.8 * theirs.token_distance
        assert ours.source_distance < theirs.source_distance
        assert ours.cluster_distance < theirs.cluster_distance
    # Lengths and rare topics are a matter of luck in a single set, but not in several.
    ours, theirs = (figures.mean(side) for side in zip(*found, strict=True))
    for name in Figures.model_fields:
        mine, chance = getattr(ours, name), getattr(theirs, name)
        assert mine >= chance if name in BETTER_HIGH else mine < chance, name


@pytest.mark.parametrize("n_samples", [200, 300, 400])
def test_sets_that_take_most_of_their_pool_beat_random_ones_too(n_samples):
    ours, theirs = compared(pool(3, shares=(1.0,)), Shape(n_samples, 128, packs=True))
    assert ours.token_distance < 0.8 * theirs.token_distance
    assert ours.cluster_distance < 0.8 * theirs.cluster_distance


@pytest.mark.parametrize("n", [1, 3, 7, 59, 99, 100])
def test_larger_stretches_lie_evenly_among_the_others(n):
    sizes = np.array([len(part) for part in selection._stretches(np.arange(100), n)])
    assert sizes.sum() == 100
    assert len(sizes) == n
    assert sizes.max() - sizes.min() <= 1
    assert np.abs(np.cumsum(sizes) - np.arange(1, n + 1) * 100 / n).max() < 1


@pytest.mark.parametrize("packs", [True, False], ids=["pack", "pad"])
@pytest.mark.parametrize("shares", [(0.6, 0.4), (0.9, 0.1), (0.15, 0.85)])
def test_sources_give_their_shares_of_tokens(shares, packs):
    candidates = pool(5, shares=shares)
    chosen = selection.cover(candidates, Shape(100, 128, packs)).samples
    given = tokens_by_source(candidates, chosen)
    off = np.abs(given / given.sum() - shares).max()
    # Whole samples of one length can be divided exactly, samples of all lengths nearly.
    assert off < 1e-12 if packs else off < 0.04


def test_quotas_are_whole_samples_by_the_largest_remainder():
    assert selection._quotas(np.array([0.5, 0.3, 0.2]), 10) == [5, 3, 2]
    assert selection._quotas(np.array([0.34, 0.33, 0.33]), 10) == [4, 3, 3]
    assert selection._quotas(np.array([0.001, 0.999]), 10) == [0, 10]
    for n in range(1, 40):
        quotas = selection._quotas(np.array([0.37, 0.21, 0.42]), n)
        assert sum(quotas) == n
        assert np.abs(quotas - np.array([0.37, 0.21, 0.42]) * n).max() < 1


def test_packed_samples_are_of_one_source_and_full():
    candidates = pool(1)
    chosen = selection.cover(candidates, Shape(50, 128, True)).samples
    assert all(sum(part.n_tokens for part in sample) == 128 for sample in chosen)
    sources = [{int(candidates.source[part.piece]) for part in sample} for sample in chosen]
    assert sorted(map(sorted, sources)) == [[0]] * 30 + [[1]] * 20
    used = [part.piece for sample in chosen for part in sample]
    assert len(used) == len(set(used))


def test_a_random_set_keeps_the_shares_where_it_is_asked_to():
    candidates = pool(1)
    drawn = selection.at_random(candidates, Shape(50, 128, True), 3, exact=True)
    given = tokens_by_source(candidates, drawn)
    assert (given / given.sum()).tolist() == pytest.approx([0.6, 0.4], abs=1e-12)


@pytest.mark.parametrize("packs", [True, False])
def test_the_same_pool_and_seed_give_the_same_choice_and_another_seed_another(packs):
    shape = Shape(40, 128, packs)
    first, second = (selection.cover(pool.__wrapped__(2), shape) for _ in range(2))
    assert first.samples == second.samples
    assert first.why == second.why
    assert (first.clusters == second.clusters).all()
    before = pool(2)
    other = Candidates(before.pieces, before.source, before.shares, VOCABULARY, seed=3)
    assert selection.cover(other, shape).samples != first.samples


def test_every_chosen_piece_says_what_it_stands_for():
    candidates = pool(4)
    choice = selection.cover(candidates, Shape(20, 128, True))
    used = {part.piece for sample in choice.samples for part in sample}
    assert set(choice.why) == used
    for number in used:
        words = re.fullmatch(
            r"represents (one piece|\d+ similar pieces) of (\d+)(?: to (\d+))? tokens",
            choice.why[number],
        )
        shortest, longest = int(words[2]), int(words[3] or words[2])
        assert words[1] == "one piece" or int(words[1].split()[0]) > 1
        assert words[3] is None or shortest < longest
        assert shortest <= candidates.lengths[number] <= longest


def test_clusters_find_the_topics():
    rng = np.random.default_rng(0)
    topics = np.repeat(np.arange(TOPICS), 40)
    pieces = [piece(rng, topic, 60) for topic in topics]
    candidates = Candidates(pieces, np.zeros(len(pieces), int), np.ones(1), VOCABULARY, 0)
    clusters = candidates.clusters(2 * TOPICS)
    assert len(np.unique(clusters)) <= 2 * TOPICS
    for cluster in np.unique(clusters):
        inside = np.bincount(topics[clusters == cluster])
        assert inside.max() / inside.sum() > 0.9


@pytest.mark.parametrize("n_clusters", [1, 2, 50, 51, 10_000])
def test_any_number_of_clusters_can_be_asked_for(n_clusters):
    candidates = pool(0, n=50)
    clusters = candidates.clusters(n_clusters)
    assert len(clusters) == 50
    assert clusters.min() >= 0
    assert clusters.max() < min(n_clusters, 50)
    if n_clusters == 1:
        assert not clusters.any()


def test_pieces_that_are_all_alike_can_be_chosen_from():
    pieces = [Piece(np.arange(10, dtype=np.int32), False) for _ in range(30)]
    candidates = Candidates(pieces, np.zeros(30, int), np.ones(1), VOCABULARY, 0)
    chosen = selection.cover(candidates, Shape(4, 20, True)).samples
    assert [sum(part.n_tokens for part in sample) for sample in chosen] == [20] * 4


def test_a_source_of_one_piece_gives_it():
    rng = np.random.default_rng(0)
    pieces = [piece(rng, 0, 64) for _ in range(40)] + [piece(rng, 1, 64)]
    source = np.array([0] * 40 + [1])
    candidates = Candidates(pieces, source, np.array([0.9, 0.1]), VOCABULARY, 0)
    for packs in (True, False):
        chosen = selection.cover(candidates, Shape(10, 64, packs)).samples
        assert tokens_by_source(candidates, chosen).tolist() == [9 * 64, 64]


@pytest.mark.parametrize("packs", [True, False])
def test_a_source_whose_share_is_less_than_a_sample_gives_nothing(packs):
    before = pool(0, n=400)
    shares = np.array([0.999, 0.001])
    candidates = Candidates(before.pieces, before.source, shares, VOCABULARY, 0)
    chosen = selection.cover(candidates, Shape(10, 128, packs)).samples
    assert len(chosen) == 10
    assert tokens_by_source(candidates, chosen)[1] == 0


def enough(candidates, shape):
    names, what = ["mine.jsonl", "theirs.jsonl"], ["9 rows read", "5 rows read, 2 empty"]
    selection.require_enough(candidates, shape, names, what)
    choice = selection.cover(candidates, shape)
    selection.require_full(candidates, shape, choice.samples, names, what)


def of_lengths(lengths, source):
    pieces = [Piece(np.arange(n, dtype=np.int32), False) for n in lengths]
    source = np.array(source)
    return Candidates(pieces, source, np.array([0.5, 0.5]), VOCABULARY, 0)


def test_too_few_tokens_are_told_with_their_numbers():
    candidates = of_lengths([10] * 9 + [10] * 5, [0] * 9 + [1] * 5)
    with pytest.raises(DataError) as refused:
        enough(candidates, Shape(8, 20, True))
    for told in ("theirs.jsonl", "50 tokens", "2 empty", "2 samples", "4 samples of 20"):
        assert told in str(refused.value)
    assert "--samples, --length" in str(refused.value)
    enough(candidates, Shape(4, 20, True))


def test_too_few_rows_to_pad_are_told_with_their_numbers():
    candidates = of_lengths([10] * 9 + [10] * 5, [0] * 9 + [1] * 5)
    with pytest.raises(DataError) as refused:
        enough(candidates, Shape(12, 20, False))
    for told in ("theirs.jsonl", "5 usable rows", "5 rows read, 2 empty", "5 samples", "needs 6"):
        assert told in str(refused.value)
    enough(candidates, Shape(10, 20, False))


def test_tokens_that_suffice_only_without_cuts_are_told_with_their_numbers():
    # Two pieces of 15 in a sample of 20 lose 10 tokens: 60 tokens are 2 samples, not 3.
    candidates = of_lengths([15] * 4 + [20] * 4, [0] * 4 + [1] * 4)
    with pytest.raises(DataError) as refused:
        enough(candidates, Shape(6, 20, True))
    for told in ("mine.jsonl has 60 tokens in 4 pieces", "2 of its 3 samples of 20", "9 rows read"):
        assert told in str(refused.value)


def samples_of(candidates, seed, cut=True):
    rng = np.random.default_rng(seed)
    pieces = rng.permutation(len(candidates.pieces))[:60].tolist()
    parts = [
        Part(p, int(candidates.lengths[p]) - (int(rng.integers(0, 3)) if cut else 0))
        for p in pieces
    ]
    return [tuple(parts[at : at + 3]) for at in range(0, 60, 3)]


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_slow_arithmetic(seed):
    candidates = pool(seed, n=400)
    samples = samples_of(candidates, seed)
    clusters = candidates.clusters(16)
    found = figures.measure(candidates, samples, clusters, 16)
    parts = [part for sample in samples for part in sample]

    wanted = {}  # the pool's tokens, of which each source has its share
    for s, share in enumerate(candidates.shares):
        mine = [
            p.ids for p, of in zip(candidates.pieces, candidates.source, strict=True) if of == s
        ]
        flat = np.concatenate(mine)
        for token in flat.tolist():
            wanted[token] = wanted.get(token, 0) + share / len(flat)
    p = np.array([wanted.get(token, 0) for token in range(VOCABULARY)])
    chosen = np.concatenate([candidates.pieces[q.piece].ids[: q.n_tokens] for q in parts])
    q = np.bincount(chosen, minlength=VOCABULARY) / len(chosen)
    assert found.token_distance == pytest.approx(jensenshannon(p, q, 2), abs=1e-9)

    common, mass = set(), 0.0
    for token in sorted(wanted, key=lambda t: -wanted[t]):
        if mass >= 0.99:
            break
        common.add(token)
        mass += wanted[token]
    have = len(common & set(chosen.tolist())) / len(common)
    assert found.vocabulary_coverage == pytest.approx(have, abs=2 / len(common))

    given = tokens_by_source(candidates, samples)
    off = np.abs(given / given.sum() - candidates.shares).sum() / 2
    assert found.source_distance == pytest.approx(off)


@pytest.mark.parametrize("seed", range(3))
def test_distances_of_lengths_and_clusters_count_pieces(seed):
    candidates = pool(seed, n=400, shares=(1.0,))
    samples = samples_of(candidates, seed)
    clusters = candidates.clusters(16)
    found = figures.measure(candidates, samples, clusters, 16)
    parts = [part for sample in samples for part in sample]
    used = [part.n_tokens for part in parts]
    expected = ks_2samp(candidates.lengths, used).statistic
    assert found.length_distance == pytest.approx(expected, abs=1e-12)
    ours = [sum(clusters[q.piece] == c for q in parts) / len(parts) for c in range(16)]
    pools = [float((clusters == c).mean()) for c in range(16)]
    off = sum(abs(a - b) for a, b in zip(ours, pools, strict=True)) / 2
    assert found.cluster_distance == pytest.approx(off)
    assert found.cluster_coverage == pytest.approx(
        sum(b for a, b in zip(ours, pools, strict=True) if a)
    )


def test_the_pool_itself_is_at_no_distance_from_itself():
    candidates = pool(0, n=200, shares=(1.0,))
    samples = [(Part(number, int(n)),) for number, n in enumerate(candidates.lengths)]
    found = figures.measure(candidates, samples, candidates.clusters(8), 8)
    assert found.model_dump() == pytest.approx(
        {
            "token_distance": 0,
            "vocabulary_coverage": 1,
            "length_distance": 0,
            "source_distance": 0,
            "cluster_distance": 0,
            "cluster_coverage": 1,
        },
        abs=1e-7,
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_number_of_samples_that_a_refusal_names_can_be_filled(seed):
    few = pool(seed, n=60, shares=(1.0,), mean=90)
    with pytest.raises(DataError) as caught:
        selection.require_enough(few, Shape(500, 128, True), ["log"], ["60 rows"])
    n = int(re.search(r"--samples (\d+)", str(caught.value))[1])
    shape = Shape(n, 128, True)
    selection.require_enough(few, shape, ["log"], ["60 rows"])
    selection.require_full(few, shape, selection.cover(few, shape).samples, ["log"], ["60 rows"])
