"""A gate's findings: pure data, for display and for programs."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from quantkit.errors import EXIT_ERROR, EXIT_GATE, EXIT_OK

SCHEMA = 1


class Answer(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Check:
    """One limit, checked for one candidate."""

    candidate: str
    asked: str
    """The metric as the policy names it, in full if that refers to several."""
    metric: str
    """The metric as the report names it."""
    kind: str
    """Kind of limit, such as `max_drop`."""
    bound: float | None
    against: str
    """`source`, or `earlier` for the report of another release."""
    before: float | None
    after: float | None
    """The candidate's own figure, unrounded."""
    amount: float | None
    """The amount compared with the limit, in its unit; more is worse except for `min`."""
    low: float | None
    """The interval of that amount, if a confidence was requested."""
    high: float | None
    confidence: float | None
    answer: Answer
    reason: str
    """One sentence: what was found, and how it compares with the limit."""
    needed: int | None = None
    """Questions or documents that would decide, if the trend continues."""


@dataclass(frozen=True)
class Verdict:
    """The answers to all checks, and their consequence."""

    checks: tuple[Check, ...]
    cannot_tell: str
    """The policy's action if nothing can be decided: `fail`, `warn` or `ask`."""
    unjudged: tuple[str, ...] = ()
    """Candidates that no rule judges, if the policy allows that."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    def with_checks(self, *checks: Check) -> "Verdict":
        """The same with further checks, such as one of a folder's files."""
        return replace(self, checks=(*self.checks, *checks))

    def of(self, answer: Answer) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.answer is answer)

    @property
    def failures(self) -> tuple[Check, ...]:
        """Checks that turn a build red."""
        counted = {Answer.FAIL} | ({Answer.CANNOT_TELL} if self.cannot_tell == "fail" else set())
        return tuple(check for check in self.checks if check.answer in counted)

    @property
    def warnings(self) -> tuple[Check, ...]:
        """Undecided checks that do not stop a build."""
        return self.of(Answer.CANNOT_TELL) if self.cannot_tell == "warn" else ()

    @property
    def outcome(self) -> Answer:
        """The overall answer, with undecided checks treated as the policy says."""
        if self.failures:
            return Answer.FAIL
        if self.cannot_tell == "ask" and self.of(Answer.CANNOT_TELL):
            return Answer.CANNOT_TELL
        return Answer.PASS

    @property
    def passed(self) -> bool:
        """Whether an engineer would ship what was judged."""
        return self.outcome is Answer.PASS

    @property
    def exit_code(self) -> int:
        codes = {Answer.PASS: EXIT_OK, Answer.FAIL: EXIT_GATE, Answer.CANNOT_TELL: EXIT_ERROR}
        return codes[self.outcome]

    @property
    def candidates(self) -> tuple[str, ...]:
        """The judged candidates, in order."""
        return tuple(dict.fromkeys(check.candidate for check in self.checks))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "outcome": str(self.outcome),
            "exit_code": self.exit_code,
            "cannot_tell": self.cannot_tell,
            "checks": [asdict(check) for check in self.checks],
            "unjudged": list(self.unjudged),
            "notes": list(self.notes),
        }
