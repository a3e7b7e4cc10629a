"""Scores for a checkpoint's model card, matched by what was scored."""

from collections.abc import Sequence

from quantkit import metrics
from quantkit.errors import ScoreError
from quantkit.export.card_facts import Figure, Scored
from quantkit.export.foreign_card import Foreign
from quantkit.export.manifest import Manifest
from quantkit.report.comparison import Report
from quantkit.report.document import Document, Entry
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.scorecard import Score, Scorecard, Settings


def of_document(
    manifest: Manifest | Foreign, document: Document, lm_eval: str | None = None
) -> Scored | None:
    """A report's scores of a checkpoint; None where the report does not know it."""
    found = next((e for e in document.candidates if e.digest == manifest.digest), None)
    if found is None:
        return None
    # The source of other tools' checkpoints is not on record: the report's source is used.
    if isinstance(manifest, Manifest) and document.baseline.digest != manifest.source.fingerprint:
        return None
    return _of_entry(found, document.baseline, lm_eval)


def of_evaluations(manifest: Manifest | Foreign, evaluations: Sequence[Evaluation]) -> list[Scored]:
    """All scores of a checkpoint, oldest first, each with its source's where available."""
    own = [e for e in evaluations if e.card.digest == manifest.digest]
    return [
        _of_evaluation(evaluation, evaluations)
        for evaluation in sorted(own, key=lambda e: e.card.created)
    ]


def scored(
    manifest: Manifest | Foreign, evaluations: Sequence[Evaluation], document: Document | None
) -> list[Scored]:
    """Scores from files and from a report; refuses when something was given and nothing fits."""
    found = of_evaluations(manifest, evaluations)
    from_report = of_document(manifest, document) if document else None
    if document and from_report is None:
        raise ScoreError(_refusal(manifest, [*document.candidates, document.baseline]))
    if evaluations and not found:
        raise ScoreError(_refusal(manifest, [evaluation.card for evaluation in evaluations]))
    if from_report is not None:
        # A report compares with all its candidates: it takes precedence over the same run's own
        # file.
        found = [run for run in found if not _same_run(run, from_report)] + [from_report]
    return found


def _same_run(one: Scored, other: Scored) -> bool:
    return one.created == other.created and one.tasks == other.tasks


def _refusal(manifest: Manifest | Foreign, given: Sequence[Entry | Scorecard]) -> str:
    """One sentence: what was looked for, and what comes close."""
    own = manifest.recipe.name if isinstance(manifest, Manifest) else manifest.declared.words
    near = [e for e in given if e.recipe == own] or [e for e in given if e.recipe]
    names = [f"{e.name} (digest {e.digest[:12]}, {e.created[:10]})" for e in (near or given)[:3]]
    more = f"; scored were {', '.join(names)}" if names else ""
    return (
        f"no score of this checkpoint, {manifest.name} with digest {manifest.digest[:12]}, among "
        f"the {len(given)} given{more}; score the folder as it is now"
    )


def _of_evaluation(evaluation: Evaluation, given: Sequence[Evaluation]) -> Scored:
    card = evaluation.card
    lm_eval = card.versions.get("lm_eval")
    alike = {
        e.card.name: e
        for e in given
        if e.card.source_fingerprint == card.source_fingerprint
        and not e.card.settings.differences(card.settings)
    }
    sources = [e for e in alike.values() if e.card.recipe is None]
    if len(sources) != 1:
        return _scored(card.scores, {}, {}, card.settings, card.created, lm_eval)
    # With all that were scored alike, so that p-values are corrected as in their report.
    others = [e for e in alike.values() if e.card.recipe and e.card.name != card.name]
    document = Report.of([sources[0], evaluation, *others]).document
    entry = next(e for e in document.candidates if e.digest == card.digest)
    return _of_entry(entry, document.baseline, lm_eval)


def _of_entry(entry: Entry, baseline: Entry, lm_eval: str | None) -> Scored:
    verdicts = {c.score: (c.verdict, c.source_at_chance) for c in entry.comparisons}
    return _scored(entry.scores, baseline.scores, verdicts, entry.settings, entry.created, lm_eval)


def _scored(
    scores: dict[str, Score],
    before: dict[str, Score],
    verdicts: dict[str, tuple[str, bool]],
    settings: Settings,
    created: str,
    lm_eval: str | None,
) -> Scored:
    figures = []
    for name, score in scores.items():
        task, _, metric = name.rpartition("/")
        known = metrics.of(metric)
        # For a distribution over tokens, its mean and its tail are enough.
        if task not in settings.tasks or (known.against_source and known.detail):
            continue
        source = None if known.against_source else before.get(name)
        verdict, at_chance = verdicts.get(name, (None, False))
        figures.append(
            Figure(
                task=task,
                metric=metric,
                value=score.value,
                stderr=score.stderr,
                n=score.n,
                higher_is_better=score.higher_is_better,
                source=source.value if source else None,
                source_stderr=source.stderr if source else None,
                verdict=verdict,
                source_at_chance=at_chance,
            )
        )
    return Scored(
        figures=tuple(figures),
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        max_length=settings.max_length,
        computed_in=settings.dtype,
        created=created,
        lm_eval=lm_eval,
    )
