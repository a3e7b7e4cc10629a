"""Which candidates are worth a look, and which one to take."""

from collections.abc import Sequence

from quantkit.score.findings import Finding
from quantkit.score.paired import ALPHA, AccuracyChange
from quantkit.score.scorecard import Scorecard
from quantkit.storage import gib

MOST_GROWTH = 0.03
"""Of a perplexity, in a candidate that is recommended."""
MOST_DROP = 0.01
"""Of an accuracy, as a fraction of the questions."""


def front(cards: Sequence[Scorecard], metric: str) -> set[str]:
    """Names of candidates that no other one beats in both size and quality."""
    best: float | None = None
    found = set()
    # By size, and the better one first where sizes are the same.
    for card in sorted(cards, key=lambda c: (c.size_bytes, loss(c, metric))):
        if best is None or loss(card, metric) < best:
            best = loss(card, metric)
            found.add(card.name)
    return found


def loss(card: Scorecard, metric: str) -> float:
    """A score turned such that less is better."""
    score = card.scores[metric]
    return -score.value if score.higher_is_better else score.value


def recommend(
    baseline: Scorecard,
    candidates: Sequence[Scorecard],
    metric: str,
    accuracy: str | None,
    findings: dict[str, Sequence[Finding]],
) -> tuple[str | None, str]:
    """The smallest candidate that loses little, and the reason in one sentence."""
    if not candidates:
        return None, "nothing was compared"
    found = [f for told in findings.values() for f in told if f.score == accuracy]
    if any(f.at_chance for f in found):
        accuracy = None  # where the source guesses, a drop says nothing
    kept = [c for c in candidates if keeps(baseline, c, metric, accuracy, findings.get(c.name, ()))]
    limits = _limits(baseline, metric, accuracy)
    if not kept:
        best = min(candidates, key=lambda c: loss(c, metric))
        return None, f"none stays within {limits}; {best.name} comes closest"
    chosen = min(kept, key=lambda c: (c.size_bytes, loss(c, metric)))
    share = chosen.size_bytes / baseline.size_bytes
    size = f"{gib(chosen.size_bytes)}, {share:.0%} of the source"
    if len(kept) == 1:
        return chosen.name, f"the only one that stays within {limits} ({size})"
    return chosen.name, f"the smallest ({size}) of {len(kept)} that stay within {limits}"


def keeps(
    baseline: Scorecard,
    card: Scorecard,
    metric: str,
    accuracy: str | None,
    findings: Sequence[Finding],
) -> bool:
    """Whether a candidate stays within the limits of a recommendation."""
    before, after = baseline.scores[metric], card.scores[metric]
    if before.higher_is_better:
        if before.value - after.value > MOST_DROP:
            return False
    elif after.value > (1 + MOST_GROWTH) * before.value:
        return False
    for finding in findings:
        change = finding.change
        if finding.score == accuracy and isinstance(change, AccuracyChange):
            # A drop counts once it is shown; few questions show nothing.
            return not (change.difference < -MOST_DROP and finding.adjusted_p < ALPHA)
    return True


def _limits(baseline: Scorecard, metric: str, accuracy: str | None) -> str:
    words = [f"{metric} +{MOST_GROWTH:.0%}"]
    if baseline.scores[metric].higher_is_better:
        words = [f"{metric} -{100 * MOST_DROP:g} point"]
    if accuracy is not None:
        words.append(f"no shown drop of {accuracy} beyond {100 * MOST_DROP:g} point")
    return " and ".join(words)
