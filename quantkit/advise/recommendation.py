"""One format for a question, with its reason, the runner-up, and what would change the choice."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.advise import remedies, words
from quantkit.advise.candidates import Candidate, judged, rechosen, served, serving
from quantkit.advise.question import OBJECTIVES, Question
from quantkit.advise.ranking import ranking_of
from quantkit.advise.remedies import Remedy
from quantkit.hardware.gpus import GPU

MOST_CHANGES = 5
LEAST_QUALITY = 0.9
"""A format that keeps less is not worth naming unasked."""
ROUNDING = 1e-6


@dataclass(frozen=True)
class Recommendation:
    """An answer; if nothing serves, `chosen` is None and `remedies` say what would."""

    question: Question
    gpu: GPU
    candidates: tuple[Candidate, ...]
    """Best first; those that do not serve come last."""
    chosen: Candidate | None
    reason: str
    runner_up: Candidate | None = None
    runner_up_reason: str = ""
    changes: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()
    """Assumptions."""

    @property
    def best(self) -> str | None:
        """The name of the format to use; None if nothing serves the model."""
        return None if self.chosen is None else self.chosen.format.name


def recommend(question: Question, gpu: GPU, in_depth: bool = True) -> Recommendation:
    """The format for a question on GPUs; without `in_depth`, what would change it is left out."""
    near = served(question, gpu)
    found = ranking_of([judged(one, question.min_quality) for one in near], question)
    able = [candidate for candidate in found if candidate.serves]
    notes = words.assumptions(question, gpu)
    if not able:
        reason = words.nothing_serves(found, question)
        ways = remedies.find(question, gpu, found) if in_depth else ()
        return Recommendation(
            question, gpu, tuple(found), None, reason, remedies=tuple(ways), notes=notes
        )
    chosen = able[0]
    second = next((c for c in able[1:] if _kind(c) != _kind(chosen)), None)
    return Recommendation(
        question,
        gpu,
        tuple(found),
        chosen,
        words.reason(chosen, able, question),
        second,
        "" if second is None else words.against(second, chosen, question),
        tuple(_changes(question, gpu, chosen, near)) if in_depth else (),
        notes=notes,
    )


def _kind(candidate: Candidate) -> str:
    """Formats that differ only in their cache or in how FP8 is scaled are of one kind."""
    key = candidate.format.key
    return "fp8" if key.startswith("fp8") else candidate.format.base


def _alike(candidate: Candidate) -> tuple[str, bool]:
    return _kind(candidate), candidate.format.has_fp8_cache


def _changes(question: Question, gpu: GPU, chosen: Candidate, near: list[Candidate]) -> list[str]:
    """Nearby questions that have another answer; `near` are this one's candidates, whatever their
    quality.
    """
    users = question.users or 1
    asked: list[tuple[str, Question]] = [
        (f"--objective {other}", question.but(objective=other))
        for other in OBJECTIVES
        if other != question.objective
    ]
    if users > 1:
        asked.append(("--users 1", question.but(users=1)))
    asked += [(f"--users {n}", question.but(users=n)) for n in (4 * users, 16 * users, 64 * users)]
    answer = question.load(users).answer
    for shorter in (question.context // 4, question.context // 16):
        prompt = shorter - min(answer, max(1, shorter // 4))
        if shorter > answer // 4 and shorter >= 64 and prompt >= question.shared_prefix:
            changed = question.but(context=shorter, answer=min(answer, max(1, shorter // 4)))
            asked.append((f"--context {shorter}", changed))
    by_format: dict[str, str] = {}
    for words_of_it, other in asked:
        best = next(iter(ranking_of(_serving(other, gpu, question, near), other)), None)
        if best is not None and _alike(best) == _alike(chosen):
            continue
        name = "nothing" if best is None else best.format.name
        by_format.setdefault(name, words.change(words_of_it, best, other))
        if len(by_format) == MOST_CHANGES:
            break
    return [*by_format.values(), *_other_qualities(question, chosen, near)]


def _other_qualities(question: Question, chosen: Candidate, near: list[Candidate]) -> Iterator[str]:
    """The least change of --min-quality in each direction that has another answer."""
    known = sorted({one.quality.recovery for one in near if one.quality is not None})
    # Rounded so that the option excludes a format, or admits one.
    stricter = [
        (math.floor(q * 1000 + ROUNDING) + 1) / 1000 for q in known if question.min_quality <= q < 1
    ]
    looser = [
        math.floor(q * 1000) / 1000
        for q in reversed(known)
        if LEAST_QUALITY <= q < question.min_quality
    ]
    for values in (stricter, looser):
        for value in values:
            other = question.but(min_quality=value)
            able = [one for one in near if judged(one, value).serves]
            best = next(iter(ranking_of(able, other)), None)
            if best is None or _alike(best) != _alike(chosen):
                yield words.change(f"--min-quality {value:g}", best, other)
                break


def _serving(
    other: Question, gpu: GPU, question: Question, near: list[Candidate]
) -> list[Candidate]:
    """What serves another question; computed from `near` if a server would be set up the same."""
    same = other.but(objective=question.objective, min_quality=question.min_quality) == question
    fills = other.users is None and "throughput" in (other.objective, question.objective)
    if not same or other.traffic != question.traffic or fills:
        return list(serving(other, gpu))
    if other.objective != question.objective:
        near = [rechosen(one, other) for one in near]
    return [one for one in near if judged(one, other.min_quality).serves]
