"""A verdict in GitHub Actions: annotations, and a job's summary.

The runner executes lines that look like `::command::` or hold `##[command]`, whoever wrote them. So
foreign text is escaped in annotations and printed where commands are disabled.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Check, Verdict
from quantkit.gating.words import last_line, reasons
from quantkit.storage import guarded

MOST = 10
"""Annotations of each kind that GitHub shows per step."""


def is_here(environment: Mapping[str, str]) -> bool:
    """Whether this runs in GitHub Actions."""
    return environment.get("GITHUB_ACTIONS") == "true"


def annotations(verdict: Verdict) -> Iterator[str]:
    """An error for each failure, a warning for what cannot be decided, a notice if all is well."""
    yield from _of_kind("error", verdict.failures)
    if verdict.cannot_tell == "ask":
        yield from _of_kind("error", verdict.of(Answer.CANNOT_TELL))
    yield from _of_kind("warning", verdict.warnings)
    if verdict.unjudged:
        names = ", ".join(map(plain, verdict.unjudged))
        yield annotation("warning", "quantkit gate", f"no rule judges {names}")
    yield annotation("notice", "quantkit gate", last_line(verdict))


def annotation(kind: str, title: str, message: str) -> str:
    """One annotation line."""
    head = _escaped(plain(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={head}::{_escaped(message)}"


def paused(text: str, token: str) -> str:
    """Text printed with commands disabled; the token must be unpredictable."""
    return f"::stop-commands::{token}\n{text}\n::{token}::"


def harmless(text: str) -> str:
    """A multi-line message in which the runner finds no command."""
    lines = text.replace("##[", "# #[").split("\n")
    return "\n".join(f"| {line}" if line.lstrip().startswith("::") else line for line in lines)


def summarize(text: str, environment: Mapping[str, str]) -> None:
    """Append to the job's summary, if there is one."""
    if not (name := environment.get("GITHUB_STEP_SUMMARY")):
        return
    path = Path(name)
    with guarded(path), path.open("a", encoding="utf-8") as stream:
        stream.write(f"{text}\n")


def _of_kind(kind: str, checks: tuple[Check, ...]) -> Iterator[str]:
    prefix = "" if all(check.answer is Answer.FAIL for check in checks) else "cannot tell: "
    found = reasons(checks)
    shown = found if len(found) <= MOST else found[: MOST - 1]
    for names, reason in shown:
        yield annotation(kind, f"quantkit gate: {names}", f"{prefix}{names}: {reason}")
    if len(shown) < len(found):
        rest = len(found) - len(shown)
        yield annotation(kind, "quantkit gate", f"and {rest} more: see the summary of this job")


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
