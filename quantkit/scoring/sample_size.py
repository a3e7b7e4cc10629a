"""Asks as many questions as a given precision needs, and no more.

Questions are drawn at random, from every task by its size, until the interval of each candidate's
difference from the source is narrow enough. Answers are cached between rounds, so a larger round
only asks what is new.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quantkit import metrics
from quantkit.errors import ScoreError
from quantkit.scoring import findings
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.options import ScoreOptions
from quantkit.scoring.paired import AccuracyChange, questions_needed

FIRST_ROUND = 200


@dataclass(frozen=True)
class Reached:
    """How it ended."""

    evaluations: list[Evaluation]
    n_questions: int
    half_width: float
    """The widest interval of all candidates, as a fraction."""
    needed: int
    """Estimated number of questions for the requested width."""

    def words(self, wanted: float) -> str:
        """Whether that was narrow enough, and how many questions would be."""
        width = f"+-{100 * self.half_width:.2f} points with {self.n_questions:,} questions"
        if self.half_width <= wanted:
            return f"{width}: narrow enough"
        return (
            f"{width}, all that there are; +-{100 * wanted:g} points would take about "
            f"{self.needed:,}"
        )


def score_until(
    run: Callable[[ScoreOptions], list[Evaluation]],
    asked: ScoreOptions,
    sizes: dict[str, int],
    wanted: float,
    tell: Callable[[str], None],
) -> Reached:
    """Ask more and more questions; `run` scores the source and its candidates, source first.

    `sizes` holds the number of documents of every task, `wanted` half the width of the interval.
    """
    orders = {task: list(range(size)) for task, size in sizes.items()}
    for task, order in orders.items():
        random.Random(f"{asked.seed} {task}").shuffle(order)
    total = sum(sizes.values())
    n = min(total, FIRST_ROUND)
    while True:
        samples = {
            task: sorted(order[: max(1, -(-n * len(order) // total))])
            for task, order in orders.items()
        }
        n_asked = sum(map(len, samples.values()))
        evaluations = run(replace(asked, samples=samples))
        changes = _changes(evaluations)
        width = max((change.high - change.low) / 2 for change in changes)
        # With several metrics, each has its share of all questions.
        needed = max(
            questions_needed(change.discordant, wanted) * n_asked // change.n_questions
            for change in changes
        )
        tell(f"{n_asked:,} questions: +-{100 * width:.2f} points")
        if width <= wanted or n_asked >= total:
            return Reached(evaluations, n_asked, width, max(needed, n_asked * (width > wanted)))
        n = min(total, max(needed, int(1.3 * n)))


def _changes(evaluations: Sequence[Evaluation]) -> list[AccuracyChange]:
    """Changes of every candidate in every metric of right and wrong answers, over all its tasks.

    Both multiple choice and generated answers; a metric that reads the same answers again is left
    out.
    """
    known = {
        f"all/{name}" for name in metrics.paired_by(metrics.ANSWERS) if not metrics.of(name).rereads
    }
    source, *candidates = evaluations
    compared = findings.compare(
        source.outcomes,
        {e.card.name: e.outcomes for e in candidates},
        {"all": sorted({outcome.task for outcome in source.outcomes})},
    )
    found = [
        finding.change
        for one in compared.values()
        for finding in one
        if finding.score in known and isinstance(finding.change, AccuracyChange)
    ]
    if not found:
        raise ScoreError(
            "--until needs tasks with right and wrong answers and at least one candidate; "
            "for perplexity all documents are read anyway"
        )
    return found
