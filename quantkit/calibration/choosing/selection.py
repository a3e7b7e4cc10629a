"""Selects the pieces of a set that represents the whole pool.

Each source gets its share of samples. Its pieces are ordered by cluster and, within a cluster, by
length, and the sequence is divided into as many strata as pieces are needed: one comes from each,
so that sources, topics and lengths are represented proportionally by construction. Within its
stratum the initial piece is the one nearest to the middle; then pieces are exchanged for others of
their stratum as long as the set's token frequencies come closer to the pool's (in Jensen-Shannon
divergence).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quantkit.calibration.choosing import packing
from quantkit.calibration.choosing.candidates import Candidates
from quantkit.calibration.choosing.packing import Sample
from quantkit.errors import DataError

SWEEPS = 4
LENGTH_BINS = 32
LENGTHS = 4.0
"""Weight of lengths, relative to tokens, if a piece is a sample: few have to represent them all."""
PIECES_PER_CLUSTER = 4
CLUSTERS = (8, 256)
COVERAGE = 0.05
"""Weight, relative to the divergence, of having every common token at least once."""
SPARE = 1.02
"""Slightly more pieces than needed are selected: the last of a sample is cut."""


@dataclass(frozen=True)
class Choice:
    """Samples, and where each selected piece comes from."""

    samples: list[Sample]
    clusters: np.ndarray
    """Clusters of all candidates."""
    n_clusters: int
    why: dict[int, str]
    """A short reason for each selected piece."""


@dataclass(frozen=True)
class Shape:
    """The requested number and length of samples."""

    n_samples: int
    length: int
    packs: bool

    def shares(self, candidates: Candidates) -> np.ndarray:
        """Each source's share of the samples, such that it gets its share of the tokens."""
        if self.packs:
            return candidates.shares
        tokens = np.bincount(candidates.source, candidates.lengths, len(candidates.shares))
        numbers = np.bincount(candidates.source, minlength=len(candidates.shares))
        samples = candidates.shares * numbers / np.maximum(tokens, 1)
        return samples / samples.sum()

    def samples(
        self, chosen: Sequence[int], spare: Sequence[int], candidates: Candidates, n: int
    ) -> list[Sample]:
        """The selected pieces in samples; spare ones follow if they do not suffice."""
        lengths = candidates.lengths
        if self.packs:
            divisible = candidates.divisible
            return packing.pack(chosen, spare, lengths, n, self.length, divisible)
        return packing.pad([*chosen, *spare][:n], lengths)


def cover(candidates: Candidates, shape: Shape) -> Choice:
    """Samples that represent the pool."""
    quotas = _quotas(shape.shares(candidates), shape.n_samples)
    wanted = [_n_pieces(candidates, s, quota, shape) for s, quota in enumerate(quotas)]
    n_clusters = int(np.clip(sum(wanted) // PIECES_PER_CLUSTER, *CLUSTERS))
    clusters = candidates.clusters(n_clusters)
    stretches: list[np.ndarray] = []
    for s, n in enumerate(wanted):
        mine = np.flatnonzero(candidates.source == s)
        order = mine[np.lexsort((candidates.lengths[mine], clusters[mine]))]
        stretches += _stretches(order, n)
    chosen = [_middle(candidates, stretch) for stretch in stretches]
    chosen = _exchange(candidates, stretches, chosen, shape.packs)
    rng = np.random.default_rng(candidates.seed)
    samples: list[Sample] = []
    for s, quota in enumerate(quotas):
        taken = np.array([piece for piece in chosen if candidates.source[piece] == s], int)
        others = np.setdiff1d(np.flatnonzero(candidates.source == s), taken)
        first, spare = rng.permutation(taken).tolist(), rng.permutation(others).tolist()
        samples += shape.samples(first, spare, candidates, quota)
    shuffled = [samples[i] for i in rng.permutation(len(samples))]
    return Choice(shuffled, clusters, n_clusters, _reasons(candidates, shuffled, stretches))


def at_random(candidates: Candidates, shape: Shape, seed: int, exact: bool = False) -> list[Sample]:
    """Random samples: what any other tool would use.

    Sources have their shares on average, or as exactly as whole samples allow.
    """
    rng = np.random.default_rng(seed)
    shares = shape.shares(candidates)
    quotas = (
        _quotas(shares, shape.n_samples)
        if exact
        else rng.multinomial(shape.n_samples, shares).tolist()
    )
    samples: list[Sample] = []
    for s, quota in enumerate(quotas):
        order = rng.permutation(np.flatnonzero(candidates.source == s)).tolist()
        n = _n_pieces(candidates, s, quota, shape)
        samples += shape.samples(order[:n], order[n:], candidates, quota)
    return [samples[i] for i in rng.permutation(len(samples))]


def require_enough(candidates: Candidates, shape: Shape, names: list[str], what: list[str]) -> None:
    """Refuse a set that cannot be filled, and report what there is and what removed the rest."""
    for s, quota in enumerate(_quotas(shape.shares(candidates), shape.n_samples)):
        mine = candidates.source == s
        if shape.packs:
            tokens = int(candidates.lengths[mine].sum())
            if tokens >= quota * shape.length:
                continue
            have = f"{tokens:,} tokens in {int(mine.sum()):,} pieces"
            need = f"{quota * shape.length:,} for {quota} samples of {shape.length:,}"
            n_fitting = tokens // shape.length
            if len(names) == 1:
                n_fitting = _n_filled(candidates, shape, n_fitting)
        else:
            if int(mine.sum()) >= quota:
                continue
            n_fitting = int(mine.sum())
            have, need = f"{n_fitting:,} usable rows", f"{quota}"
        alone = len(names) == 1
        fewer = f"--samples {n_fitting}" if alone and n_fitting else "--samples"
        raise DataError(
            f"{names[s]} has {have} ({what[s]}), enough for {n_fitting:,} samples; "
            f"{'the set' if alone else 'its share of the set'} needs {need}. Add rows, "
            f"{'' if alone else 'lower its weight, '}or ask for fewer or shorter samples "
            f"({fewer}, --length)"
        )


def _n_filled(candidates: Candidates, shape: Shape, n: int) -> int:
    """How many samples of one source can be filled, of `n` by tokens alone: the last piece of a
    sample is cut, and how many tokens that loses depends on which pieces are chosen.
    """
    while n > 0:
        full = len(_full(cover(candidates, replace(shape, n_samples=n)).samples, shape))
        if full >= n:
            break
        n = full
    return n


def _full(samples: Sequence[Sample], shape: Shape) -> list[Sample]:
    return [s for s in samples if sum(part.n_tokens for part in s) == shape.length]


def require_full(
    candidates: Candidates,
    shape: Shape,
    samples: Sequence[Sample],
    names: list[str],
    what: list[str],
) -> None:
    """Refuse an incomplete set, if too many ends of pieces were lost."""
    if not shape.packs:
        return
    found = [candidates.source[sample[0].piece] for sample in _full(samples, shape)]
    filled = np.bincount(found, minlength=len(names))
    for s, quota in enumerate(_quotas(shape.shares(candidates), shape.n_samples)):
        if filled[s] < quota:
            mine = candidates.lengths[candidates.source == s]
            alone = len(names) == 1
            fewer = f"--samples {filled[s]}" if alone and filled[s] else "--samples"
            raise DataError(
                f"{names[s]} has {mine.sum():,} tokens in {len(mine):,} pieces, enough for "
                f"{filled[s]} of its {quota} samples of {shape.length:,}, since the last piece of "
                f"a sample is cut ({what[s]}); add rows, {'' if alone else 'lower its weight, '}or "
                f"ask for fewer or shorter samples ({fewer}, --length)"
            )


def _reasons(
    candidates: Candidates, samples: list[Sample], stretches: list[np.ndarray]
) -> dict[int, str]:
    """What each piece in the samples represents."""
    stands_for = {
        piece: (len(stretch), lengths.min(), lengths.max())
        for stretch in stretches
        for lengths in (candidates.lengths[stretch],)
        for piece in stretch.tolist()
    }
    reasons = {}
    for part in (part for sample in samples for part in sample):
        n, shortest, longest = stands_for[part.piece]
        lengths = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        pieces = "one piece" if n == 1 else f"{n} similar pieces"
        reasons[part.piece] = f"represents {pieces} of {lengths} tokens"
    return reasons


def _quotas(shares: np.ndarray, n_samples: int) -> list[int]:
    """Whole samples for each source; the largest remainders are rounded up."""
    exact = shares * n_samples
    quotas = np.floor(exact).astype(int)
    for place in np.argsort(quotas - exact, kind="stable")[: n_samples - int(quotas.sum())]:
        quotas[place] += 1
    return quotas.tolist()


def _n_pieces(candidates: Candidates, source: int, quota: int, shape: Shape) -> int:
    """Pieces that fill a source's samples, at their average length."""
    mine = candidates.lengths[candidates.source == source]
    if not quota:
        return 0
    n = int(np.ceil(SPARE * quota * shape.length / mine.mean())) if shape.packs else quota
    return min(n, len(mine))


def _stretches(order: np.ndarray, n: int) -> list[np.ndarray]:
    """Parts of nearly one size. The larger ones lie evenly among the others: all at one end, as
    numpy splits, they would leave the topics there with fewer samples than is their due.
    """
    if not n:
        return []
    return np.split(order, np.arange(1, n) * len(order) // n)


def _middle(candidates: Candidates, stretch: np.ndarray) -> int:
    features = candidates.features[stretch]
    return int(stretch[(features @ features.sum(0)).argmax()])


def _exchange(
    candidates: Candidates, stretches: list[np.ndarray], chosen: list[int], packs: bool
) -> list[int]:
    """Exchange pieces within their strata while that brings the set closer to the pool.

    The divergence is a sum over tokens and over length bins; an exchange changes only those of its
    two pieces.
    """
    counts, tokens = candidates.counts, _Balance(candidates.histogram, candidates.common)
    tokens.start(counts.histogram(np.array(chosen), candidates.vocabulary))
    # Packed samples have one length, so sources have their shares of tokens anyway; others have
    # them only if the lengths of each source are right.
    bins, due = _length_bins(candidates, by_source=not packs)
    price = 1.0 if packs else LENGTHS
    lengths = _Balance(due)
    lengths.start(np.bincount(bins[chosen], minlength=len(due)).astype(float))
    for _ in range(SWEEPS):
        changed = 0
        # The average cost of a token, so that long pieces are not penalised for their length.
        each = tokens.mean_cost
        for place, stretch in enumerate(stretches):
            if len(stretch) < 2:
                continue
            old = chosen[place]
            tokens.add(*counts.of(old), sign=-1)
            lengths.add(bins[[old]], np.ones(1), sign=-1)
            where, first = counts.spans(stretch)
            gain = tokens.gain(counts.tokens[where], counts.numbers[where])
            worth = np.add.reduceat(gain, first) - each * candidates.lengths[stretch]
            worth += price * lengths.gain(bins[stretch], np.ones(len(stretch)))
            best = int(stretch[worth.argmin()])
            tokens.add(*counts.of(best))
            lengths.add(bins[[best]], np.ones(1))
            chosen[place] = best
            changed += best != old
        if not changed:
            break
    return chosen


class _Balance:
    """Distance of counts from their target frequencies: Jensen-Shannon, term by term."""

    def __init__(self, due: np.ndarray, common: np.ndarray | None = None) -> None:
        self._due = due
        self._bonus = np.zeros(len(due))
        if common is not None:
            self._bonus[common] = COVERAGE / len(common)

    def start(self, counts: np.ndarray) -> None:
        """Start with these counts; they stay normalised by their sum."""
        self._counts, self._total = counts, float(counts.sum())

    @property
    def mean_cost(self) -> float:
        """The divergence per count."""
        places = np.flatnonzero(self._due)
        return float(self._terms(places, self._counts[places]).sum()) / 2 / self._total

    def add(self, places: np.ndarray, numbers: np.ndarray, sign: int = 1) -> None:
        """Add or subtract counts at distinct indices."""
        self._counts[places] += sign * numbers

    def gain(self, places: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The change from adding, per index."""
        before = self._counts[places]
        return self._terms(places, before + numbers) - self._terms(places, before)

    def _terms(self, places: np.ndarray, counts: np.ndarray) -> np.ndarray:
        p, q = self._due[places], counts / self._total
        m = (p + q) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            both = np.where(q > 0, q * np.log(q / m), 0) + np.where(p > 0, p * np.log(p / m), 0)
        return both - np.where(q > 0, self._bonus[places], 0)


def _length_bins(candidates: Candidates, by_source: bool) -> tuple[np.ndarray, np.ndarray]:
    """The length bin of each piece, and the target share of each bin.

    The bins are those of all pieces, or of each source by itself.
    """
    share = candidates.weights / candidates.lengths
    share = share / share.sum()
    bins, n_bins = np.zeros(len(share), np.int64), 0
    group = candidates.source if by_source else np.zeros(len(share), np.int64)
    for g in np.unique(group):
        mine = np.flatnonzero(group == g)
        order = mine[np.argsort(candidates.lengths[mine], kind="stable")]
        steps = np.arange(1, LENGTH_BINS) / LENGTH_BINS * share[mine].sum()
        at = np.searchsorted(np.cumsum(share[order]), steps)
        edges = np.unique(candidates.lengths[order][np.minimum(at, len(order) - 1)])
        bins[mine] = n_bins + np.searchsorted(edges, candidates.lengths[mine])
        n_bins += len(edges) + 1
    return bins, np.bincount(bins, share, minlength=n_bins)
