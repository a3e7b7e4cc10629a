"""Limits that a whole interval has to meet, not a point estimate: pass, fail, or cannot tell."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from quantkit.errors import ScoreError
from quantkit.gating import intervals, words
from quantkit.gating.case import Case
from quantkit.gating.figures import Figure
from quantkit.gating.policy import RELATIVE, Bound
from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Check
from quantkit.report.document import Comparison
from quantkit.scoring.bounds import Interval, needed

TINY, HUGE = sys.float_info.min, sys.float_info.max


def three_way(check: Check, figure: Figure, bound: Bound, case: Case) -> Check:
    """Pass if the whole interval is within the limit, fail if all of it is beyond."""
    if bound.kind not in RELATIVE:
        return _of_figure(check, figure, bound, case)
    found = case.comparisons(figure.key)
    name, candidate = plain(figure.key), plain(case.entry.name)
    if len(found) != case.n_wanted or _of_change(check, bound, found) is None:
        return _without(
            check,
            bound,
            case.shortage(figure),
            f"the report has no interval of {name} for {candidate}, which `confidence` needs: "
            "report it from scores with their answers next to them, with five documents or "
            "more; intervals of more than 95% need a report of this version, and end at 99.9%",
        )

    def interval(times: float) -> Interval | None:
        return _of_change(check, bound, found, times)

    noun = "questions" if found[0].n_questions is not None else "documents"
    return _answered(check, bound, interval, intervals.n_of(found[0]), noun, candidate)


def _of_figure(check: Check, figure: Figure, bound: Bound, case: Case) -> Check:
    """From the figure's own standard error."""
    assert bound.confidence is not None
    confidence = bound.confidence

    def interval(times: float) -> Interval | None:
        return intervals.of_figure(case.entry, figure.key, confidence, times)

    candidate = plain(case.entry.name)
    if interval(1.0) is None:
        return _without(
            check,
            bound,
            case.shortage(figure),
            f"{plain(figure.key)} of {candidate} has no standard error, which `confidence` needs: "
            "score two documents or more",
        )
    n = intervals.n_documents(case.entry, figure.key)
    return _answered(check, bound, interval, n, "documents", candidate)


def _without(check: Check, bound: Bound, short: str, reason: str) -> Check:
    """A figure over the limit fails without an interval, unless there is too little evidence."""
    beyond = _is_beyond(check, bound)
    if beyond and not short:
        sentence = words.sentence(replace(check, confidence=None, answer=Answer.FAIL))
        return replace(check, answer=Answer.FAIL, reason=f"{sentence}; {reason}")
    return replace(check, answer=Answer.CANNOT_TELL, reason=reason)


def _answered(
    check: Check,
    bound: Bound,
    interval: Callable[[float], Interval | None],
    n: int | None,
    noun: str,
    candidate: str,
) -> Check:
    now = interval(1.0)
    assert now is not None
    check = replace(check, low=now[0], high=now[1])
    if (answer := _answer(now, bound)) is not Answer.CANNOT_TELL:
        if answer is Answer.PASS and _is_beyond(check, bound):
            raise ScoreError(
                f"scores and answers of {candidate} contradict each other on "
                f"{plain(check.metric)}; make the report again from its scores"
            )
        check = replace(check, answer=answer)
        return replace(check, reason=words.sentence(check))

    def is_decided(times: float) -> bool:
        then = interval(times)
        return then is not None and _answer(then, bound) is not Answer.CANNOT_TELL

    enough = needed(n, is_decided) if n else None
    check = replace(check, answer=Answer.CANNOT_TELL, needed=enough)
    return replace(check, reason=words.sentence(check, noun, n))


def _is_beyond(check: Check, bound: Bound) -> bool:
    if check.amount is None:
        return False
    return check.amount < bound.value if bound.kind == "min" else check.amount > bound.value


def _answer(interval: Interval, bound: Bound) -> Answer:
    low, high = interval
    if bound.kind == "min":
        return _answer((-high, -low), Bound("max", -bound.value, bound.confidence))
    if high <= bound.value:
        return Answer.PASS
    return Answer.FAIL if low > bound.value else Answer.CANNOT_TELL


def _of_change(
    check: Check, bound: Bound, found: Sequence[Comparison], times: float = 1.0
) -> Interval | None:
    """The interval of the amount that is compared with the limit, in the limit's unit."""
    assert bound.confidence is not None
    # Two intervals that must both hold with this confidence: each may err half as often.
    each = 1 - (1 - bound.confidence) / len(found)
    parts = [intervals.of_change(comparison, each, times) for comparison in found]
    if any(part is None for part in parts):
        return None
    (low, high), *others = [part for part in parts if part is not None]
    if bound.kind == "max_drop":
        for other_low, other_high in others:
            low, high = low - other_high, high - other_low
        return -100 * high, -100 * low
    for other_low, other_high in others:
        low, high = low / max(other_high, TINY), high / max(other_low, TINY)
    unit = 100.0 if bound.kind == "max_increase_pct" else (check.before or 0.0)
    return min(unit * (low - 1), HUGE), min(unit * (high - 1), HUGE)
