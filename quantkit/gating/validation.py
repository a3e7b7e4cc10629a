"""Checks that a report can be judged at all, and that a policy fits it."""

import difflib
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from quantkit import metrics
from quantkit.errors import PolicyError, ScoreError, UnknownName
from quantkit.gating.figures import ACCURACY, SIZES, Figure, find, known_names
from quantkit.gating.policy import RELATIVE, Limit, Rule
from quantkit.gating.text import plain
from quantkit.report.document import Document

MOST_NAMES = 30
MOST_RULES = 3


def require_sound(document: Document, what: str) -> None:
    """Refuse a report that would make a check meaningless."""
    baseline = document.baseline
    if not document.candidates:
        raise ScoreError(f"{what} has no candidates: there is nothing to judge")
    names = [baseline.name, *(entry.name for entry in document.candidates)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ScoreError(f"two models of {what} are called {plain(twice)}; report them again")
    for entry in (baseline, *document.candidates):
        bits = entry.bits_per_weight
        if entry.size_bytes <= 0 or not math.isfinite(bits) or bits <= 0:
            raise ScoreError(
                f"{plain(entry.name)} of {what} has {entry.size_bytes} bytes and {bits} bits per "
                "weight, which no model has; report it again"
            )
        if differences := entry.settings.differences(baseline.settings):
            raise ScoreError(
                f"{plain(entry.name)} of {what} was scored with other settings than its source "
                f"({plain(', '.join(differences))}); score them with the same settings"
            )


def require_comparable(document: Document, earlier: Document) -> None:
    """Refuse two reports whose figures are not comparable."""
    ours, theirs = document.baseline, earlier.baseline
    if ours.digest != theirs.digest:
        raise ScoreError(
            f"the reports have different sources: {plain(ours.name)} ({plain(ours.digest[:16])}) "
            f"and {plain(theirs.name)} ({plain(theirs.digest[:16])}); compare releases of one model"
        )
    if differences := ours.settings.differences(theirs.settings):
        raise ScoreError(
            "the reports were scored with different settings "
            f"({plain(', '.join(differences))}); score both with the same settings"
        )


def require_fitting(document: Document, rules: Mapping[str, Sequence[Rule]]) -> None:
    """Refuse names that are not in a report, and limits that make no sense there."""
    entries = document.candidates
    names = {name for entry in entries for name in (entry.name, entry.recipe or entry.name)}
    problems: dict[str, list[str]] = {}
    for part, listed in rules.items():
        for place, rule in enumerate(listed, start=1):
            where = f"{part} #{place}"
            for pattern in rule.recipes:
                if not any(fnmatchcase(name, pattern) for name in names):
                    error = UnknownName("recipe", plain(pattern), map(plain, names))
                    problems.setdefault(str(error), []).append(where)
            for asked, limit in rule.limits.items():
                for problem in _misfits(document, asked, limit):
                    problems.setdefault(problem, []).append(where)
    if problems:
        lines = "\n  ".join(f"{_places(at)}: {problem}" for problem, at in problems.items())
        raise PolicyError(f"the policy does not fit the report:\n  {lines}")


def _places(at: Sequence[str]) -> str:
    """The first rules with a problem; the shipped policies have more than a sentence can hold."""
    found = list(dict.fromkeys(at))
    more = f" and {len(found) - MOST_RULES} more" if len(found) > MOST_RULES else ""
    return ", ".join(found[:MOST_RULES]) + more


def _misfits(document: Document, asked: str, limit: Limit) -> list[str]:
    figures = find(document, asked)
    if not figures and limit.if_scored:
        return []
    if not figures and asked == metrics.PERPLEXITY:
        return [
            "no scored task gives a perplexity; score a text such as wikitext or python_docs, too, "
            "or give a policy of your own (--policy)"
        ]
    if not figures:
        return [_unknown(document, asked)]
    return [problem for figure in figures for problem in _wrong_limits(figure, limit)]


def _wrong_limits(figure: Figure, limit: Limit) -> list[str]:
    name, found = plain(figure.key), []
    for bound in limit.bounds:
        if figure.more_is_better and bound.kind in ("max", "max_increase", "max_increase_pct"):
            found.append(f"for {name}, higher is better: limit it by min or max_drop")
        if not figure.more_is_better and bound.kind == "max_drop":
            found.append(f"for {name}, lower is better: limit it by max or max_increase")
        if not figure.more_is_better and bound.kind == "min" and not figure.is_size:
            found.append(f"for {name}, lower is better: limit it by max or max_increase")
    changes = any(bound.kind in RELATIVE for bound in limit.bounds)
    bare = not figure.is_scored or (changes and not figure.is_paired)
    if limit.confidence is not None and bare:
        found.append(
            f"{name} has no interval in a report; confidence goes with accuracies and perplexity, "
            "and with max and min on scores that have a standard error"
        )
    return found


def _unknown(document: Document, asked: str) -> str:
    """Near matches, or a readable list of what there is."""
    names = {plain(name) for name in known_names(document)}
    if (named := f"{plain(asked)}/{metrics.PERPLEXITY}") in names:
        return f"{plain(asked)} is a text, not a metric: write {named}, or perplexity for all texts"
    if len(names) > MOST_NAMES and not difflib.get_close_matches(asked, names, cutoff=0.5):
        short = {metrics.PERPLEXITY, ACCURACY, *metrics.distances(), *SIZES}
        names &= short | set(map(plain, document.baseline.settings.tasks))
    return str(UnknownName("metric", plain(asked), names))
