"""How well a set represents the pool it was selected from, in a few numbers."""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from quantkit.calibration.choosing.candidates import Candidates
from quantkit.calibration.choosing.packing import Sample


class Figures(BaseModel):
    """A set against its pool; distances are between 0 (alike) and 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    token_distance: float
    """Jensen-Shannon distance of token frequencies, with logarithms of base 2."""
    vocabulary_coverage: float
    """Share of the tokens that make up 99% of the pool which the set contains."""
    length_distance: float
    """Kolmogorov-Smirnov distance of the lengths of pieces."""
    source_distance: float
    """Total variation distance of the sources' shares of tokens."""
    cluster_distance: float
    """Total variation distance of the clusters' shares of pieces."""
    cluster_coverage: float
    """Share of the pool in clusters that the set covers."""


BETTER_HIGH = ("vocabulary_coverage", "cluster_coverage")


def measure(
    candidates: Candidates, samples: Sequence[Sample], clusters: np.ndarray, n_clusters: int
) -> Figures:
    """The figures of some samples."""
    parts = [part for sample in samples for part in sample]
    pieces = np.array([part.piece for part in parts])
    used = np.array([part.n_tokens for part in parts])
    flat = np.concatenate([p.of(candidates.pieces[p.piece].ids) for p in parts])
    tokens = np.bincount(flat, minlength=candidates.vocabulary) / max(1, len(flat))
    per_piece = candidates.weights / candidates.lengths  # a piece counts once, whatever its length
    per_piece /= per_piece.sum()
    shares = np.bincount(candidates.source[pieces], used, minlength=len(candidates.shares))
    pool_clusters = np.bincount(clusters, per_piece, minlength=n_clusters)
    set_clusters = np.bincount(clusters[pieces], minlength=n_clusters) / len(pieces)
    return Figures(
        token_distance=_jensen_shannon(candidates.histogram, tokens),
        vocabulary_coverage=float((tokens[candidates.common] > 0).mean()),
        length_distance=_kolmogorov(candidates.lengths, per_piece, used),
        source_distance=float(np.abs(shares / shares.sum() - candidates.shares).sum() / 2),
        cluster_distance=float(np.abs(pool_clusters - set_clusters).sum() / 2),
        cluster_coverage=float(pool_clusters[set_clusters > 0].sum()),
    )


def mean(figures: Sequence[Figures]) -> Figures:
    """The mean of several sets' figures."""
    names = Figures.model_fields
    return Figures(**{n: float(np.mean([getattr(f, n) for f in figures])) for n in names})


def _jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    m = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(p > 0, p * np.log2(p / m), 0).sum()
        right = np.where(q > 0, q * np.log2(q / m), 0).sum()
    return float(np.sqrt(max(0.0, (left + right) / 2)))


def _kolmogorov(pool: np.ndarray, weights: np.ndarray, chosen: np.ndarray) -> float:
    grid = np.unique(np.concatenate([pool, chosen]))
    order = np.argsort(pool, kind="stable")
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    ours = np.searchsorted(np.sort(chosen), grid, side="right") / len(chosen)
    theirs = below[np.searchsorted(pool[order], grid, side="right")]
    return float(np.abs(ours - theirs).max())
