"""Which candidates are worth a look, and which one to take.

A candidate is recommended where every scored task shows that it lost little: the far end of each
95% interval stays within the limit. These bounds are not adjusted for the number of candidates.
Such an adjustment keeps chance from being called a loss, and would let more losses pass the more
candidates there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from quantkit import metrics
from quantkit.report.evidence import FLOOR, Counted, judged
from quantkit.scoring import bounds
from quantkit.scoring.findings import Finding
from quantkit.scoring.paired import ALPHA, AccuracyChange, PerplexityChange
from quantkit.scoring.scorecard import Scorecard
from quantkit.scoring.verdict import most_points
from quantkit.storage import gib

MOST_GROWTH = 0.03
"""Largest increase of a perplexity in a recommended candidate."""
MOST_DROP = 0.01
"""Largest drop of an accuracy, as a fraction of the questions."""
MOST_NAMED = 4
"""Scores that a sentence names one by one."""
CONFIDENCE = 1 - ALPHA


class Answer(Enum):
    WITHIN = "the whole interval is within the limit"
    BEYOND = "the whole interval is beyond the limit"
    OPEN = "neither is shown, or there is too little evidence"
    VOID = "there is nothing to judge by, however much is scored"


@dataclass(frozen=True)
class Judgement:
    """One score of one candidate, compared with its limit."""

    score: str
    answer: Answer
    reason: str = ""
    """What is missing where the answer is open, or why nothing can be judged."""


@dataclass(frozen=True)
class Decision:
    """The candidate to take, or none, with the reason in one sentence."""

    name: str | None
    reason: str
    not_judged: tuple[str, ...] = ()
    """Scores and tasks that the decision does not cover, each with the reason."""


def front(cards: Sequence[Scorecard], metric: str) -> set[str]:
    """Names of candidates that no other one beats in both size and quality."""
    best: float | None = None
    found = set()
    # By size, and the better one first where sizes are equal.
    for card in sorted(cards, key=lambda c: (c.size_bytes, loss(c, metric))):
        if best is None or loss(card, metric) < best:
            best = loss(card, metric)
            found.add(card.name)
    return found


def loss(card: Scorecard, metric: str) -> float:
    """A score as a loss: lower is better."""
    score = card.scores[metric]
    return -score.value if score.higher_is_better else score.value


def recommend(
    baseline: Scorecard,
    candidates: Sequence[Scorecard],
    metric: str,
    findings: Mapping[str, Sequence[Finding]],
) -> Decision:
    """The smallest candidate that is shown to lose little on every task."""
    if not candidates:
        return Decision(None, "nothing was compared")
    known = {*baseline.scores, *(f.score for of_entry in findings.values() for f in of_entry)}
    known |= {key for card in candidates for key in card.scores}
    tasks = dict(judged(baseline.settings.tasks, baseline.groups, known))
    keys = list(dict.fromkeys(key for found in tasks.values() for key in found))
    verdicts = {
        card.name: [judge(key, baseline, card, findings.get(card.name, ())) for key in keys]
        for card in candidates
    }
    without = [f"{task} (it gives no perplexity or accuracy)" for task in tasks if not tasks[task]]
    not_judged = (*_void(verdicts), *without)
    counted = [
        key for key in keys if any(_at(v, key).answer is not Answer.VOID for v in verdicts.values())
    ]
    if not counted:
        return Decision(None, f"nothing could be judged{_besides(not_judged)}", not_judged)
    limits, besides = _limits(counted), _besides(not_judged)
    kept = [c for c in candidates if _is_kept(verdicts[c.name])]
    if kept:
        chosen = min(kept, key=lambda c: (c.size_bytes, loss(c, metric)))
        share = chosen.size_bytes / baseline.size_bytes
        size = f"{gib(chosen.size_bytes)}, {share:.0%} of the source"
        what = f"the smallest ({size}) of {len(kept)} that stay within {limits}"
        if len(kept) == 1:
            what = f"the only one that stays within {limits} ({size})"
        return Decision(chosen.name, f"{what}, by whole 95% intervals{besides}", not_judged)
    still_open = [c for c in candidates if not _is_beyond(verdicts[c.name])]
    if not still_open:
        best = min(candidates, key=lambda c: loss(c, metric))
        return Decision(
            None,
            f"no candidate stays within {limits}; {best.name} comes closest{besides}",
            not_judged,
        )
    best = min(still_open, key=lambda c: (_n_open(verdicts[c.name]), loss(c, metric)))
    missing = [j for j in verdicts[best.name] if j.answer is Answer.OPEN]
    reasons = "; ".join(f"{j.score} {j.reason}" for j in missing[:MOST_NAMED])
    more = f"; and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    reason = (
        f"no candidate is shown to stay within {limits}; {best.name} comes closest: "
        f"{reasons}{more}{besides}"
    )
    return Decision(None, reason, not_judged)


def judge(key: str, baseline: Scorecard, card: Scorecard, findings: Sequence[Finding]) -> Judgement:
    """Compare one score with its limit: by paired answers where available."""
    finding = next((f for f in findings if f.score == key), None)
    if finding is None:
        return _unpaired(key, baseline, card)
    change = finding.change
    if isinstance(change, AccuracyChange):
        return _accuracy(key, card, change, finding.at_chance)
    return _perplexity(key, card, change)


def _accuracy(key: str, card: Scorecard, change: AccuracyChange, at_chance: bool) -> Judgement:
    n = change.n_questions
    short = Counted.of(key, card.scores, n_questions=n).shortage(FLOOR)
    if at_chance and not short:
        reason = "the source itself does no better than guessing"
        return Judgement(key, Answer.VOID, reason)
    if at_chance:
        return Judgement(
            key, Answer.OPEN, f"is no better than guessing even in the source: it {short}"
        )

    def answer(times: float) -> Answer:
        ends = bounds.of_difference(change.gained, change.lost, n, CONFIDENCE, times)
        assert ends is not None
        return _answer(-ends[1], -ends[0], MOST_DROP)

    found = _worst(answer(1.0), short)
    if found is not Answer.OPEN or short:
        return Judgement(key, found, short)
    enough = bounds.needed(n, lambda times: answer(times) is not Answer.OPEN)
    worst = f"may have fallen by up to {most_points(change.low)} points"
    return Judgement(key, found, f"{worst}, and {_needed(enough, n, 'questions')}")


def _perplexity(key: str, card: Scorecard, change: PerplexityChange) -> Judgement:
    n = change.n_documents
    short = Counted.of(key, card.scores, n, change.n_tokens).shortage(FLOOR)
    usual = (change.low, change.high)
    if usual[0] is None or usual[1] is None:
        return Judgement(key, Answer.OPEN, short or "has too few documents for an interval")
    ends = (usual[0], usual[1])

    def answer(times: float) -> Answer:
        found = bounds.of_ratio(change.ratio, ends, {}, n, CONFIDENCE, times)
        assert found is not None
        return _answer(found[0] - 1, found[1] - 1, MOST_GROWTH)

    found = _worst(_answer(ends[0] - 1, ends[1] - 1, MOST_GROWTH), short)
    if found is not Answer.OPEN or short:
        return Judgement(key, found, short)
    enough = bounds.needed(n, lambda times: answer(times) is not Answer.OPEN)
    worst = f"may have grown by up to {100 * (ends[1] - 1):.2f}%"
    return Judgement(key, found, f"{worst}, and {_needed(enough, n, 'documents')}")


def _unpaired(key: str, baseline: Scorecard, card: Scorecard) -> Judgement:
    """By two separate scores, whose bounds are wide: both models saw the same documents."""
    before, after = baseline.scores.get(key), card.scores.get(key)
    if before is None:
        return Judgement(key, Answer.VOID, "the source has no such score")
    if after is None:
        return Judgement(key, Answer.OPEN, f"is not scored for {card.name}")
    is_text = metrics.of(key).paired == metrics.LOSSES
    short = Counted.of(key, card.scores).shortage(FLOOR)
    if is_text:
        n = bounds.documents_of(card.scores, key)
        ends = bounds.of_separate_perplexities(before, after, n, CONFIDENCE)
        worst, best = (ends[1] - 1, ends[0] - 1) if ends else (0.0, 0.0)
        limit, verdict = MOST_GROWTH, f"may have grown by up to {worst:.2%}"
    else:
        ends = bounds.of_separate_accuracies(before, after, CONFIDENCE)
        worst, best = (-ends[0], -ends[1]) if ends else (0.0, 0.0)
        limit, verdict = MOST_DROP, f"may have fallen by up to {most_points(-worst)} points"
    if ends is None:
        reason = (
            "has neither paired answers nor a standard error: keep the answers next to the scores"
        )
        return Judgement(key, Answer.OPEN, reason)
    found = _worst(_answer(best, worst, limit), short)
    if found is not Answer.OPEN:
        return Judgement(key, found)
    paired = "the paired answers of both models would narrow it: keep them next to the scores"
    return Judgement(key, found, short or f"{verdict} by the scores alone; {paired}")


def _answer(least: float, most: float, limit: float) -> Answer:
    """By the ends of the interval of the loss."""
    if most <= limit:
        return Answer.WITHIN
    return Answer.BEYOND if least > limit else Answer.OPEN


def _worst(answer: Answer, short: str) -> Answer:
    """Too little evidence cannot show quality, but may show a loss beyond the limit."""
    return Answer.OPEN if short and answer is Answer.WITHIN else answer


def _needed(enough: int | None, n: int, noun: str) -> str:
    if enough is None:
        return f"no number of {noun} would settle it, {n:,} were compared"
    return f"about {float(f'{enough:.2g}'):,.0f} {noun} would settle it, {n:,} were compared"


def _at(found: Sequence[Judgement], key: str) -> Judgement:
    return next(one for one in found if one.score == key)


def _is_kept(found: Sequence[Judgement]) -> bool:
    answers = {one.answer for one in found}
    return Answer.WITHIN in answers and answers <= {Answer.WITHIN, Answer.VOID}


def _is_beyond(found: Sequence[Judgement]) -> bool:
    return any(one.answer is Answer.BEYOND for one in found)


def _n_open(found: Sequence[Judgement]) -> int:
    return sum(one.answer is Answer.OPEN for one in found)


def _void(verdicts: Mapping[str, Sequence[Judgement]]) -> list[str]:
    """Scores that no candidate could be judged by; the reasons are those of the source."""
    every = (one for found in verdicts.values() for one in found if one.answer is Answer.VOID)
    return list(dict.fromkeys(f"{one.score} ({one.reason})" for one in every))


def _besides(not_judged: Sequence[str]) -> str:
    if not not_judged:
        return ""
    more = len(not_judged) - MOST_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"; not judged: {', '.join(not_judged[:MOST_NAMED])}{rest}"


def _limits(keys: Sequence[str]) -> str:
    """Such as `wikitext/perplexity +3% and mmlu/acc -1 point`."""
    texts = [key for key in keys if metrics.of(key).paired == metrics.LOSSES]
    quizzes = [key for key in keys if key not in texts]
    parts = []
    for found, limit, noun in (
        (texts, f"+{MOST_GROWTH:.0%}", "perplexities"),
        (quizzes, f"-{100 * MOST_DROP:g} point", "accuracies"),
    ):
        if len(keys) > MOST_NAMED and len(found) > 1:
            parts.append(f"{limit} on each of {len(found)} {noun}")
        else:
            parts += [f"{key} {limit}" for key in found]
    first = ", ".join(parts[:-1])
    return f"{first} and {parts[-1]}" if first else parts[-1]
