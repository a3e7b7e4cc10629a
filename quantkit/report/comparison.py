"""The report as data: one baseline and its candidates, all of them comparable.

The JSON form is a contract: later versions add keys and change none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit import metrics
from quantkit.errors import ScoreError
from quantkit.report import decision, hardware
from quantkit.report.document import Comparison, Document, Entry, Recommendation, Speed
from quantkit.scoring import findings
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.findings import Finding
from quantkit.scoring.scorecard import Scorecard


@dataclass(frozen=True)
class Report:
    """A source model and the checkpoints made from it, scored alike."""

    baseline: Scorecard
    candidates: tuple[Scorecard, ...]
    findings: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    """By candidate, where individual answers are known."""
    notes: tuple[str, ...] = ()
    """Notes for readers, by whoever made the report."""
    speed: tuple[Speed, ...] = ()
    """Serving speed, where it was measured."""

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], notes: tuple[str, ...] = ()) -> "Report":
        """The same from scores with their answers, which are then paired."""
        evaluations = _once(evaluations)
        report = cls.compare([e.card for e in evaluations])
        remarks = _taken_for(report.baseline, report.candidates) + _rounded_twice(report.candidates)
        report = replace(report, notes=(*notes, *remarks))
        outcomes = {e.card.name: e.outcomes for e in evaluations if e.outcomes}
        source = outcomes.pop(report.baseline.name, None)
        if not source or not outcomes:
            return report
        return replace(report, findings=findings.compare(source, outcomes, report.baseline.groups))

    @classmethod
    def compare(cls, cards: Sequence[Scorecard]) -> "Report":
        """Compare scorecards, best first; refuse those that are not comparable."""
        baselines = [card for card in cards if card.recipe is None]
        if len(baselines) != 1:
            found = ", ".join(card.name for card in baselines) or "none"
            raise ScoreError(
                f"a report needs the scores of one source model, found: {found}; score the source "
                "once, with the tasks and settings of all others"
            )
        baseline = baselines[0]
        candidates = [card for card in cards if card is not baseline]
        names = [card.name for card in cards]
        for card in candidates:
            if names.count(card.name) > 1:
                raise ScoreError(f"two of the scored models are called {card.name}")
            _refuse_another(card, baseline)
            if differences := card.settings.differences(baseline.settings):
                raise ScoreError(
                    f"{card.name} and {baseline.name} were scored with different settings "
                    f"({', '.join(differences)}); score them with the same settings"
                )
        headline = headline_of(baseline)
        return cls(baseline, tuple(sorted(candidates, key=lambda c: decision.loss(c, headline))))

    @property
    def headline(self) -> str:
        """The score that tables show first."""
        return headline_of(self.baseline)

    @property
    def accuracy(self) -> str | None:
        """The accuracy that tables show next to a headline of another kind: the first requested."""
        if metrics.of(self.headline).name == metrics.ACCURACY:
            return None
        asked = (f"{task}/{metrics.ACCURACY}" for task in self.baseline.settings.tasks)
        return next((key for key in asked if key in self.baseline.scores), None)

    def is_guessed(self, score: str) -> bool:
        """Whether the source is no better than chance, so that changes mean little."""
        found = (f for findings in self.findings.values() for f in findings)
        return any(f.at_chance for f in found if f.score == score)

    def change(self, card: Scorecard, metric: str) -> float:
        """Relative change against the baseline; for perplexities positive is worse."""
        before = self.baseline.scores[metric].value
        return card.scores[metric].value / before - 1 if before else float("nan")

    @cached_property
    def recommendation(self) -> Recommendation:
        """The recommended candidate, and why."""
        found = decision.recommend(self.baseline, self.candidates, self.headline, self.findings)
        return Recommendation(
            name=found.name, reason=found.reason, not_judged=list(found.not_judged)
        )

    @cached_property
    def front(self) -> set[str]:
        """Candidates that no other one beats in both size and quality."""
        return decision.front(self.candidates, self.headline)

    def best(self, n: int) -> "Report":
        """The same with `n` candidates: the recommended one, the front, then the best."""
        chosen, front = self.recommendation.name, self.front
        ranked = sorted(self.candidates, key=lambda c: (c.name != chosen, c.name not in front))
        kept = {card.name for card in ranked[:n]}
        return replace(self, candidates=tuple(c for c in self.candidates if c.name in kept))

    @property
    def document(self) -> Document:
        """The report as it is written to a file."""
        front = self.front
        return Document(
            headline=self.headline,
            accuracy=self.accuracy,
            baseline=self._entry(self.baseline, False),
            groups=self.baseline.groups,
            candidates=[self._entry(card, card.name in front) for card in self.candidates],
            recommended=self.recommendation,
            notes=list(self.notes),
            speed=list(self.speed),
        )

    def to_json(self) -> dict[str, Any]:
        return self.document.to_json()

    @property
    def recommended(self) -> str | None:
        """The recommended candidate; None where none is shown to lose little."""
        return self.recommendation.name

    def table(self) -> str:
        """The comparison as Markdown, with verdicts."""
        from quantkit.report import markdown

        return markdown.render(self)

    def save(self, folder: str | Path) -> None:
        """Write `report.json`, `report.md` and `report.html` into a folder."""
        from quantkit.report import files

        files.write(self, Path(folder))

    def _entry(self, card: Scorecard, pareto: bool) -> Entry:
        found = self.findings.get(card.name, ())
        return Entry(
            name=card.name,
            recipe=card.recipe,
            format=card.format,
            digest=card.digest,
            size_bytes=card.size_bytes,
            size_ratio=card.size_bytes / self.baseline.size_bytes,
            bits_per_weight=card.bits_per_weight,
            scores=card.scores,
            settings=card.settings,
            device=card.device,
            created=card.created,
            made=card.made,
            verified=card.verified,
            comparisons=[Comparison.model_validate(f.to_json()) for f in found],
            pareto=pareto,
            gpus=hardware.runs_on(card),
        )


def _refuse_another(card: Scorecard, baseline: Scorecard) -> None:
    """Refuse a checkpoint of another model; for other tools' checkpoints, as far as both
    cards say.
    """
    if card.source_fingerprint == baseline.digest:
        return
    if card.source_fingerprint or card.made is None or card.made.by_others is None:
        raise ScoreError(f"{card.name} was not made from {baseline.name}")
    if card.likeness is None or card.likeness != baseline.likeness:
        raise ScoreError(
            f"{card.name} was not made from {baseline.name}: it is {card.likeness}, and "
            f"{baseline.name} is {baseline.likeness or 'scored by an older quantkit'}; score both "
            "in one command"
        )


def _taken_for(baseline: Scorecard, candidates: Sequence[Scorecard]) -> list[str]:
    """Notes for readers about checkpoints that others made."""
    return [
        f"{card.name} was not made by quantkit ({card.made.by_others}). Its files do not say which "
        f"model it was made from: it is taken for one of {baseline.name} by architecture and "
        "vocabulary."
        for card in candidates
        if card.made is not None and card.made.by_others
    ]


def _rounded_twice(candidates: Sequence[Scorecard]) -> list[str]:
    """Notes about checkpoints whose source was quantised already."""
    by: dict[str, list[str]] = {}
    for card in candidates:
        if card.made is not None and card.made.source_quantized_by:
            by.setdefault(card.made.source_quantized_by, []).append(card.name)
    return [
        f"The source of {', '.join(names)} had been quantised already ({method}). Changes are "
        "against its dequantised weights; what that rounding lost is not among them."
        for method, names in by.items()
    ]


def _once(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Each model once: runs of several machines contain the same source, scored again."""
    newest: dict[tuple[str, str], Evaluation] = {}
    for evaluation in evaluations:
        key = (evaluation.card.digest, evaluation.card.settings.model_dump_json())
        before = newest.get(key)
        if before is None or before.card.created < evaluation.card.created:
            newest[key] = evaluation
    return list(newest.values())


def headline_of(card: Scorecard) -> str:
    """Perplexity per token if available, otherwise the first score."""
    if not card.scores:
        raise ScoreError(f"{card.name} has no scores")
    texts = (key for key in card.scores if metrics.of(key).name == metrics.PERPLEXITY)
    return next(texts, next(iter(card.scores)))
