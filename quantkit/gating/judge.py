"""From a report and a policy to a verdict: opens no file and prints nothing.

What cannot be judged never passes: it fails, is marked as `cannot tell`, or is an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction

from quantkit.errors import PolicyError, ScoreError
from quantkit.gating import causes, validation, words
from quantkit.gating.case import Case
from quantkit.gating.classes import class_of, size_of
from quantkit.gating.confidence import HUGE, three_way
from quantkit.gating.figures import CALIBRATION, MADE, OUTLIER, Figure, find
from quantkit.gating.policy import RELATIVE, Bound, Policy, Rule
from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Check, Verdict
from quantkit.report.document import Document, Entry

SAME = 1e-9
"""Figures of a report that differ by less are the same, computed in two ways."""


def judge(document: Document, policy: Policy, earlier: Document | None = None) -> Verdict:
    """Check every candidate against the rules that name it."""
    validation.require_sound(document, "the report")
    if earlier is not None:
        if not policy.against:
            raise PolicyError(
                "the policy has no rules under `against`, which --against needs; add some, such as "
                "`against: [{perplexity: {max_increase_pct: 0.5}}]`, or leave out --policy"
            )
        validation.require_sound(earlier, "the earlier report")
        validation.require_comparable(document, earlier)
    elif not policy.rules:
        raise PolicyError("all rules of the policy are under `against`: give --against REPORT")
    rules = {"rules": policy.rules, "against": policy.against if earlier is not None else []}
    validation.require_fitting(document, rules)
    checks: list[Check] = []
    figures: dict[str, list[Figure]] = {}
    floor = policy.evidence.floor
    for entry in document.candidates:
        checks += _of_rules(policy.rules, Case(document, entry, figures, floor), policy)
        if earlier is not None:
            before = _counterpart(entry, document, earlier)
            case = Case(document, entry, figures, floor, earlier, before)
            checks += _of_rules(policy.against, case, policy)
    checks = list(_with_causes(checks, document))
    judged = {check.candidate for check in checks if check.bound is not None}
    unjudged = [entry.name for entry in document.candidates if entry.name not in judged]
    if unjudged and (policy.unjudged == "error" or not judged):
        raise PolicyError(
            f"no rule judges {', '.join(map(plain, unjudged))}; add one, or `unjudged: warn` "
            "where some candidates need no judging"
        )
    notes = tuple(_notes(document, policy, earlier, rules))
    return Verdict(tuple(checks), policy.cannot_tell, tuple(unjudged), notes)


def _with_causes(checks: Sequence[Check], document: Document) -> Iterator[Check]:
    """Add the likely cause to each candidate's first loss of quality."""
    entries = {entry.name: entry for entry in document.candidates}
    explained: set[str] = set()
    for check in checks:
        quality = "/" in check.metric or check.metric == OUTLIER
        lost = check.answer is Answer.FAIL and quality and check.amount is not None
        if lost and check.candidate not in explained:
            explained.add(check.candidate)
            if found := causes.cause(entries[check.candidate]):
                yield replace(check, reason=f"{check.reason}; {found}")
                continue
        yield check


def covers(rule: Rule, entry: Entry, document: Document) -> bool:
    """Whether a rule applies to a candidate."""
    names = (entry.name, entry.recipe or entry.name)
    named = any(fnmatchcase(name, pattern) for name in names for pattern in rule.recipes)
    of_class = rule.bits in (None, class_of(entry)) and rule.size in (None, size_of(document))
    return named and of_class


def _of_rules(rules: Sequence[Rule], case: Case, policy: Policy) -> Iterator[Check]:
    for rule in rules:
        if not covers(rule, case.entry, case.document):
            continue
        for asked, limit in rule.limits.items():
            if asked not in case.figures:
                case.figures[asked] = find(case.document, asked)
            # None if `if_scored` allows it; otherwise the policy would not have fitted.
            for figure in case.figures[asked]:
                if figure.key in MADE and figure.of(case.entry, case.document) is None:
                    continue  # reported in a note
                for bound in limit.bounds:
                    yield _check(figure, bound, case, policy)


def _check(figure: Figure, bound: Bound, case: Case, policy: Policy) -> Check:
    before, after = case.figure_before(figure), figure.of(case.entry, case.document)
    check = Check(
        candidate=case.entry.name,
        asked=figure.asked,
        metric=figure.key,
        kind=bound.kind,
        bound=bound.value,
        against=case.against,
        before=before,
        after=after,
        amount=None,
        low=None,
        high=None,
        confidence=bound.confidence,
        answer=Answer.FAIL,
        reason="",
    )
    if lacking := _lacking(figure, bound, case, before, after):
        if policy.missing == "error":
            raise ScoreError(lacking)
        return replace(check, reason=lacking)
    assert after is not None
    exact = _amount(figure, bound, case, before, after)
    check = replace(check, amount=_float(exact))
    if reason := _guessed(figure, bound, case):
        return replace(check, answer=Answer.CANNOT_TELL, reason=reason)
    if bound.confidence is not None:
        check = three_way(check, figure, bound, case)
    else:
        check = _by_figure(check, bound, exact)
    return _with_evidence(check, case.shortage(figure))


def _by_figure(check: Check, bound: Bound, exact: Fraction) -> Check:
    """By the point estimate, ignoring chance."""
    held = exact >= _exact(bound.value) if bound.kind == "min" else exact <= _exact(bound.value)
    check = replace(check, answer=Answer.PASS if held else Answer.FAIL)
    return replace(check, reason=words.sentence(check))


def _with_evidence(check: Check, short: str) -> Check:
    """Too little evidence never passes, and fails only what an interval shows to be beyond the
    limit.
    """
    if not short or (check.answer is Answer.FAIL and check.low is not None):
        return check
    name = plain(check.metric)
    return replace(check, answer=Answer.CANNOT_TELL, reason=f"{name} cannot be judged: it {short}")


def _lacking(
    figure: Figure, bound: Bound, case: Case, before: float | None, after: float | None
) -> str:
    """Why there is nothing to compare with a limit."""
    name, key = plain(case.entry.name), plain(figure.key)
    if after is None:
        return f"{name} has no {key}, which the policy limits; score it with that task"
    if bound.kind not in RELATIVE or before is not None:
        return ""
    if case.earlier is None:
        return f"the source has no {key} to compare {name} with; score it with that task"
    if case.before is None:
        return f"the earlier report has no {name} to compare with"
    return f"{name} has no {key} in the earlier report; score both with the same settings"


def _guessed(figure: Figure, bound: Bound, case: Case) -> str:
    """Why a drop is meaningless if even the source only guesses."""
    found = case.comparisons(figure.key)
    if bound.kind != "max_drop" or not any(c.source_at_chance for c in found):
        return ""
    return (
        f"the source itself does no better than guessing on {plain(figure.key)}, "
        "so a drop cannot be judged; choose a task that the source can do"
    )


def _amount(
    figure: Figure, bound: Bound, case: Case, before: float | None, after: float
) -> Fraction:
    """The amount compared with the limit, exact: a drop of one point is not one of 1.0000000001."""
    new = _exact(after)
    if bound.kind not in RELATIVE or before is None:
        return new
    old = _exact(before)
    if bound.kind == "max_increase":
        return new - old
    if bound.kind == "max_increase_pct":
        if old <= 0:
            raise ScoreError(
                f"{plain(figure.key)} of {words.AGAINST[case.against]} is {before:g}, so a "
                "percentage means nothing; limit it by max or max_increase"
            )
        return 100 * (new / old - 1)
    counted = case.comparisons(figure.key) if case.earlier is None else []
    for one in counted:
        # Shares such as 2/3 are rounded in a file; the number of changed questions is not.
        if one.n_questions and one.gained is not None and one.lost is not None:
            drop = Fraction(one.lost - one.gained, one.n_questions)
            if abs(drop - (old - new)) < SAME:
                return 100 * drop
    return (old - new) * (100 if figure.is_share else 1)


def _counterpart(entry: Entry, document: Document, earlier: Document) -> Entry | None:
    """The same checkpoint in the earlier report: by name, or by a recipe that each has once."""
    for other in earlier.candidates:
        if (other.name, other.recipe) == (entry.name, entry.recipe):
            return other
    ours = [e for e in document.candidates if e.recipe == entry.recipe]
    theirs = [e for e in earlier.candidates if e.recipe == entry.recipe]
    return theirs[0] if len(ours) == len(theirs) == 1 and entry.recipe is not None else None


def _notes(
    document: Document, policy: Policy, earlier: Document | None, rules: dict[str, list[Rule]]
) -> Iterator[str]:
    """What was left out, so that nobody assumes it was judged."""
    notes = {}
    for rule in (rule for part in rules.values() for rule in part):
        if not any(covers(rule, entry, document) for entry in document.candidates):
            continue
        for asked in rule.limits:
            if not find(document, asked):
                notes[asked] = f"{words.label(asked)} was not judged: the report has no such score"
    yield from notes.values()
    yield from _unjudged_scores(document, rules)
    if earlier is None:
        if policy.against:
            yield "rules under `against` were not applied: there is no --against"
        return
    matched = [_counterpart(entry, document, earlier) for entry in document.candidates]
    gone = [e.name for e in earlier.candidates if not any(e is other for other in matched)]
    if gone:
        yield f"only in the earlier report: {', '.join(map(plain, gone))}"


def _unjudged_scores(document: Document, rules: dict[str, list[Rule]]) -> Iterator[str]:
    """Scored tasks that no rule covers, and candidates that lack a figure."""
    asked = {name for part in rules.values() for rule in part for name in rule.limits}
    figures = [figure for name in sorted(asked) for figure in find(document, name)]
    judged = {figure.key.rpartition("/")[0] for figure in figures}
    for task in document.baseline.settings.tasks:
        if task not in judged:
            yield f"{plain(task)} was scored, but no rule judges it"
    for figure in figures:
        if figure.key not in MADE:
            continue
        lacking = [
            entry.name
            for entry in document.candidates
            if figure.of(entry, document) is None and not _needs_none(figure, entry)
        ]
        if lacking:
            names = ", ".join(map(plain, lacking[:5]))
            label = words.label(figure.key)
            yield f"{label} was not judged for {names}: it is not known how they were made"


def _needs_none(figure: Figure, entry: Entry) -> bool:
    """Whether a candidate has no such figure by nature."""
    if entry.made is None:
        return False
    return entry.made.calibration is None if figure.key == CALIBRATION else not entry.made.layers


def _exact(value: float) -> Fraction:
    """The decimal number as written in the file, not the nearest binary one."""
    return Fraction(repr(float(value)))


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return HUGE if value > 0 else -HUGE
