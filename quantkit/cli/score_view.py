"""Terminal output of `quantkit score`."""

from typing import TYPE_CHECKING

from quantkit import metrics
from quantkit.cli import console, start

if TYPE_CHECKING:
    from quantkit.calls.score import Scored
    from quantkit.scoring.scorecard import Scorecard


def show(scored: "Scored", as_json: bool, verbose: bool) -> None:
    """A table of scores, and in words whether differences from the source are real."""
    cards = [evaluation.card for evaluation in scored.evaluations]
    if as_json:
        console.print_json([card.to_json() for card in cards])
        return
    every = [(card, key, score) for card in cards for key, score in card.scores.items()]
    shown = [row for row in every if verbose or not (_is_part(*row[:2]) or _is_detail(*row[:2]))]
    from_cache = any(_cached(card, key) for card, key, _ in shown)
    console.print_table(
        ["model", "score", "value", "stderr", "n", *(["cached"] if from_cache else [])],
        [
            [
                card.name,
                key,
                metrics.shown(key, s.value),
                "" if s.stderr is None else metrics.shown(key, s.stderr),
                f"{s.n:,}",
                *([_cached(card, key)] if from_cache else []),
            ]
            for card, key, s in shown
        ],
        words=(0, 1),
    )
    if hidden := len(every) - len(shown):
        console.say(f"{hidden} more with -v, and in --json.")
    both = [*([scored.before] if scored.before is not None else []), *scored.evaluations]
    if len(both) > 1 and sum(e.card.recipe is None for e in both) == 1:
        start.show_verdicts(both)


def _is_detail(card: "Scorecard", key: str) -> bool:
    """Whether a score repeats what another one says."""
    metric = metrics.of(key)
    return metric.detail or (card.recipe is None and metric.against_source)


def _cached(card: "Scorecard", key: str) -> str:
    """How much of a score comes from cached answers; empty if none does."""
    share = card.cached.get(key.rpartition("/")[0], 0.0)
    return "" if not share else "all" if share == 1 else f"{max(share, 0.01):.0%}"


def _is_part(card: "Scorecard", key: str) -> bool:
    """Whether a score belongs to one task of a group, of which there may be dozens."""
    task = key.rpartition("/")[0]
    inside = {member for members in card.groups.values() for member in members}
    return task in inside and task not in card.settings.tasks
