"""Which scores a candidate is judged by, and how much evidence that takes."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quantkit import metrics
from quantkit.scoring.bounds import documents_of
from quantkit.scoring.scorecard import Score
from quantkit.scoring.verdict import FEWEST_DOCUMENTS

MOST_COLUMNS = 4
"""Scores with a column of their own; with more, a table shows the first, the verdicts all."""


@dataclass(frozen=True)
class Floor:
    """The minimum evidence for a judgement, however narrow its interval is."""

    documents: int = 0
    tokens: int = 0
    """For a perplexity."""
    positions: int = 0
    """For a divergence from the source."""
    questions: int = 0


FLOOR = Floor(documents=FEWEST_DOCUMENTS, tokens=5_000, positions=2_000, questions=200)
"""For a recommendation, and in the policies that ship. Intervals treat documents as a sample of
what a model will read; a handful is not a sample. Some 200 questions rule out a drop of 2 points
where not one answer changes, and fewer never do.
"""


@dataclass(frozen=True)
class Counted:
    """What a score was measured on."""

    documents: int | None = None
    tokens: int | None = None
    positions: int | None = None
    questions: int | None = None

    @classmethod
    def of(
        cls,
        key: str,
        scores: Mapping[str, Score],
        n_documents: int | None = None,
        n_tokens: int | None = None,
        n_questions: int | None = None,
    ) -> "Counted":
        """Counts of a paired comparison, otherwise those of the scores themselves."""
        metric, score = metrics.of(key), scores.get(key)
        n = None if score is None else score.n
        if not metric.is_per_token:
            return cls(questions=n if n_questions is None else n_questions)
        documents = documents_of(scores, key) if n_documents is None else n_documents
        if metric.counts == "tokens":
            return cls(documents, tokens=n if n_tokens is None else n_tokens)
        return cls(documents, positions=n)

    def shortage(self, floor: Floor) -> str:
        """Why a score has too little evidence: `rests on ...`; empty where it is enough.

        An unknown number of documents counts as too few: scores or answers must state it.
        """
        if self.questions is not None:
            pairs = [("questions", self.questions)]
        else:
            what = "tokens" if self.tokens is not None else "positions"
            pairs = [("documents", self.documents or 0), (what, getattr(self, what) or 0)]
        if all(found >= getattr(floor, name) for name, found in pairs):
            return ""
        unknown = self.questions is None and self.documents is None
        found = " and ".join(
            f"an unknown number of {name}"
            if name == "documents" and unknown
            else f"{n:,} {name.removesuffix('s') if n == 1 else name}"
            for name, n in pairs
        )
        wanted = " and ".join(f"{getattr(floor, name):,} {name}" for name, _ in pairs)
        return f"rests on {found}, and a judgement needs at least {wanted}"


def judged(
    tasks: Iterable[str], groups: Mapping[str, Sequence[str]], known: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Every requested task, with the scores that it is judged by.

    All its perplexities and accuracies, `acc` and `acc_norm` alike: they read the same answers in
    two ways, and either may be the one that a task is known by. A group is judged by its own score,
    not by each of its tasks: MMLU's 57 subjects have about a hundred questions each, too few to
    rule out a drop of a few points in any one, and of 57 bounds of 95% an honest candidate breaks
    one or two by chance. To judge one subject, request it by name. Only a group that has no score
    of its own is judged by those of its tasks.
    """
    each = (*metrics.paired_by(metrics.LOSSES), *metrics.paired_by(metrics.ANSWERS))
    for task in tasks:
        found = [f"{task}/{metric}" for metric in each if f"{task}/{metric}" in known]
        if not found:
            inside = (f"{name}/{metric}" for name in groups.get(task, ()) for metric in each)
            found = [key for key in inside if key in known]
        yield task, found


def columns(
    first: Iterable[str | None],
    tasks: Iterable[str],
    groups: Mapping[str, Sequence[str]],
    known: Collection[str],
) -> list[str]:
    """A table's scores: `first`, then what else candidates are judged by, unless those are many."""
    shown = [key for key in first if key]
    keys = (key for _, found in judged(tasks, groups, known) for key in found)
    more = [key for key in dict.fromkeys(keys) if key not in shown]
    return shown + more if len(shown + more) <= MOST_COLUMNS else shown
