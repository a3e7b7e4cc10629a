"""Checks and verdicts in words."""

from collections.abc import Iterable

from quantkit import metrics
from quantkit.gating.figures import CALIBRATION, OUTLIER, SIZE
from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Check, Verdict
from quantkit.scoring.verdict import percent_interval, points_interval

DECIMALS = {"max_increase_pct": 2, SIZE: 1, "bits_per_weight": 2, CALIBRATION: 4, OUTLIER: 4}
"""Of changes in percent, and of figures that are not scores; scores have their metric's."""
MOST_DECIMALS = 15
TO_SETTLE = "To settle it, score more: without any --limit, or with another task."
HUGE = 1e6  # digits of a broken model's figures mean nothing
AGAINST = {"source": "the source", "earlier": "the earlier report"}
MEANING = {
    CALIBRATION: " (perplexity of the calibration tokens over that of the scored text; noise, or "
    "tokens of another tokenizer, gives hundreds)",
    OUTLIER: " (error of the worst layer over the median of its kind)",
}
"""What the figures about how a candidate was made stand for: no table of metrics has them."""
OTHERS = {
    CALIBRATION: "calibration ratio",
    OUTLIER: "layer outlier",
    SIZE: "size ratio",
    "bits_per_weight": "bits per weight",
}
"""Labels of figures that are not scores."""


def amount(check: Check) -> str:
    """What was found, with enough digits to distinguish it from its limit."""
    if check.amount is None:
        return "" if check.kind == "digest" else "missing"
    return _quantity(check, check.amount)


def metric(check: Check) -> str:
    """The metric's label, and what it is compared with if that is unusual.

    A task, or a metric of one task, is named as in the policy.
    """
    return label(check.asked) + (" (earlier)" if check.against == "earlier" else "")


def label(asked: str) -> str:
    """The label of what a rule asks for: the one that tables and pages have."""
    known = metrics.METRICS.get(asked)
    return known.label if known else OTHERS.get(asked, plain(asked))


def limit(check: Check) -> str:
    """What is allowed."""
    if check.bound is None:
        return "as scored"
    if check.kind == "max_drop":
        return f"at most {_quantity(check, check.bound, shortest=True, unsigned=True)} lower"
    side = "at least" if check.kind == "min" else "at most"
    return f"{side} {_quantity(check, check.bound, shortest=True)}"


def short_limit(check: Check) -> str:
    """The same for a narrow column, in the unit of the value beside it: `≤ +4%`, `≥ -2`."""
    if check.bound is None:
        return limit(check)
    sign = "≥" if check.kind in ("min", "max_drop") else "≤"
    return f"{sign} {_quantity(check, check.bound, shortest=True).partition(' ')[0]}"


def interval(check: Check) -> str:
    """Such as `-1.9 to +0.5`, in ascending order; relative changes end in a percent sign."""
    if check.low is None or check.high is None:
        return ""
    if check.kind == "max_increase_pct":  # the same digits as in the report
        return percent_interval(1 + check.low / 100, 1 + check.high / 100)
    if check.kind == "max_drop":
        return points_interval(-check.high / 100, -check.low / 100)
    digits = _decimals(check)
    if _in_percent(check):
        return " to ".join(f"{100 * end:,.{digits}f}%" for end in (check.low, check.high))
    return f"{check.low:,.{digits}f} to {check.high:,.{digits}f}"


def sentence(check: Check, needed_of: str = "", n: int | None = None) -> str:
    """What was found, how it came about, and how it compares with the limit."""
    name = plain(check.metric)
    if check.kind in ("max", "min"):
        found = f"{name} is {amount(check)}{MEANING.get(check.metric, '')}"
    else:
        way = "fell" if _falls(check) else "grew"
        size = _quantity(check, abs(check.amount or 0.0), unsigned=True)
        ends = f" ({_figure(check, check.before)} to {_figure(check, check.after)})"
        found = f"{name} {way} by {size} against {AGAINST[check.against]}{ends}"
        if not check.amount:
            found = f"{name} is unchanged against {AGAINST[check.against]}{ends}"
    allowed = _allowed(check)
    if check.confidence is not None and check.low is not None:
        found += f", {100 * check.confidence:g}% interval {interval(check)}"
    if check.answer is not Answer.CANNOT_TELL:
        return f"{found}; {allowed}"
    way = "less" if check.kind == "min" else "more"
    found += f"; {allowed}, and {way} is neither shown nor ruled out"
    if check.needed is not None and n is not None:
        about = f"{float(f'{check.needed:.2g}'):,.0f}"
        return f"{found}: about {about} {needed_of} would settle it, {n:,} were compared"
    return f"{found}: the estimate lies on the limit, so no number of {needed_of} would settle it"


def reasons(checks: Iterable[Check]) -> list[tuple[str, str]]:
    """Each reason once, with its candidates."""
    found: dict[str, list[str]] = {}
    for check in checks:
        found.setdefault(check.reason, []).append(plain(check.candidate))
    return [(", ".join(dict.fromkeys(names)), reason) for reason, names in found.items()]


def last_line(verdict: Verdict) -> str:
    """The overall verdict in one line."""
    n, m = len(verdict.checks), len(verdict.candidates)
    whole = f"{n} check{'s' * (n != 1)} of {m} candidate{'s' * (m != 1)}"
    if verdict.outcome is Answer.FAIL:
        counted = verdict.failures
        undecided = [check for check in counted if check.answer is Answer.CANNOT_TELL]
        n_open, verb = len(undecided), "is" if len(undecided) == 1 else "are"
        more = f"; {n_open} {verb} undecided, which the policy counts as failed (cannot_tell: fail)"
        return f"fail: {len(counted)} of {whole}: {_names(counted)}{more * bool(undecided)}"
    if verdict.outcome is Answer.CANNOT_TELL:
        counted = verdict.of(Answer.CANNOT_TELL)
        return f"cannot tell: {len(counted)} of {whole}: {_names(counted)}"
    left = f"; not judged: {', '.join(map(plain, verdict.unjudged))}" if verdict.unjudged else ""
    if verdict.warnings:
        return f"pass: {whole}, {len(verdict.warnings)} undecided{left}"
    return f"pass: {whole}{left}"


def _names(checks: tuple[Check, ...]) -> str:
    names = [plain(name) for name in dict.fromkeys(check.candidate for check in checks)]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _sign(check: Check) -> int:
    return -1 if check.kind == "max_drop" else 1


def _falls(check: Check) -> bool:
    return _sign(check) * (check.amount or 0.0) < 0


def _allowed(check: Check) -> str:
    bound = _quantity(check, check.bound or 0.0, shortest=True, unsigned=True)
    verb = "are" if bound.endswith("points") else "is"
    return (
        f"at least {bound} is required"
        if check.kind == "min"
        else f"at most {bound} {verb} allowed"
    )


def _quantity(check: Check, value: float, shortest: bool = False, unsigned: bool = False) -> str:
    """A number in its limit's unit; drops as negative changes, in sentences without a sign."""
    shown = (value if unsigned else _sign(check) * value) + 0.0  # no negative zero
    if _in_percent(check):
        shown *= 100
    # 15 digits drop the noise of the factor: 0.28 is 28%, not 28.000000000000004%.
    digits = f"{shown:.15g}" if shortest else _apart(check, shown, unsigned)
    if check.kind in ("max", "min"):
        nats = " nats" * (metrics.of(check.metric).unit == "nats")
        return f"{digits}{'%' * _in_percent(check)}{nats}"
    sign = "+" if shown > 0 and not unsigned else ""
    unit = {"max_increase_pct": "%", "max_drop": " points"}.get(check.kind, "")
    if check.kind == "max_drop" and not _in_points(check):
        unit = ""
    if digits in ("1", "-1") and unit == " points":
        unit = " point"
    return f"{sign}{digits}{unit}"


def _apart(check: Check, shown: float, unsigned: bool) -> str:
    """As many decimals as in reports, or more where rounding would reach or cross the limit."""
    if abs(shown) >= HUGE:
        return f"{shown:.3g}"
    bound = (check.bound or 0.0) * (1 if unsigned else _sign(check))
    bound *= 100 if _in_percent(check) else 1
    for decimals in range(_decimals(check), MOST_DECIMALS + 1):
        digits = f"{shown:,.{decimals}f}"
        rounded = float(digits.replace(",", ""))
        if shown == bound or (rounded != bound and (rounded < bound) == (shown < bound)):
            return digits
    return repr(shown)


def _decimals(check: Check) -> int:
    """Those of the same figure in a report."""
    known = DECIMALS.get(check.kind, DECIMALS.get(check.metric))
    return metrics.decimals(check.metric) if known is None else known


def _in_points(check: Check) -> bool:
    return metrics.of(check.metric).is_share


def _in_percent(check: Check) -> bool:
    """Whether the figure itself is bounded, and is a share: reports show those in percent."""
    return check.kind in ("max", "min") and (_in_points(check) or check.metric == SIZE)


def _figure(check: Check, value: float | None) -> str:
    if value is None:
        return "none"
    if check.metric == SIZE:
        return f"{100 * value:.{DECIMALS[SIZE]}f}%"
    if check.metric in DECIMALS or abs(value) >= HUGE:
        return f"{value:.5g}"
    return metrics.shown(check.metric, value)
