"""Finds the exception that an engine died of in a log written by many processes.

vLLM's server, its engine core and its workers are separate processes. When one fails, the next one
up only reports that something "above" did, and all of them write tracebacks into one log with
interleaved lines. So lines are first separated by process, and then the first exception counts that
does not itself point to another.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# (Worker_TP0 pid=12) ERROR 10-15 08:32:29 [core.py:708] ValueError: ...
_PROCESS = re.compile(r"\(\S[^()]*? pid=\d+\) ?")
_LEVEL = re.compile(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?([^\]\s]+)\] ?"
)
_BEGINS = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Empty|Warning)?(: |$)")
_LINKS = {
    "The above exception was the direct cause of the following exception:": True,
    "During handling of the above exception, another exception occurred:": False,
}
"""Text between two chained exceptions: whether the earlier one is the cause."""
_POINTS = re.compile(
    r"(Engine core initialization failed|WorkerProc initialization failed|"
    r"EngineCore encountered an issue|Engine process failed to start|EngineDeadError|"
    r"Executor failed|[Cc]ancelled|died unexpectedly|KeyboardInterrupt|SystemExit)"
)
"""Exceptions that only report that there was another one."""
QUIET = ("DEBUG", "INFO", "WARNING")
MORE = 3
"""Lines of an exception's message beyond the first."""


@dataclass
class _Stream:
    """Log lines from one code location of one process."""

    is_quiet: bool = False
    inside: bool = False
    """Whether a traceback has begun and its exception has not been reached yet."""
    keeps: bool = False
    """Whether the next exception is a consequence of the last one."""
    found: list["_LoggedException"] = field(default_factory=list)


@dataclass
class _LoggedException:
    """An exception, and its line number in the log."""

    number: int
    text: str
    n_more: int = 0


def root_cause(words: str) -> str | None:
    """The exception that the first failing process died of, in one line; None if there is none."""
    streams: dict[tuple[str, str], _Stream] = {}
    for number, (process, level, place, text) in enumerate(_lines(words)):
        stream = streams.setdefault((process, place), _Stream(level in QUIET))
        _take(stream, number, text)
    found = [one for s in streams.values() if not s.is_quiet for one in s.found]
    own = [one for one in found if not _POINTS.search(one.text)]
    return min(own, key=lambda one: one.number).text if own else None


def without_chatter(words: str) -> str:
    """A log without the engines' routine output."""
    return "\n".join(text for _, level, _, text in _lines(words) if level not in QUIET)


def _lines(words: str) -> Iterator[tuple[str, str, str, str]]:
    """Process, level, code location and text of every line; the first three may be empty."""
    for line in words.splitlines():
        process = _PROCESS.match(line)
        rest = line[process.end() :] if process else line
        level = _LEVEL.match(rest)
        text = rest[level.end() :] if level else rest
        yield (
            process.group().strip() if process else "",
            level.group(1) if level else "",
            level.group(2) if level else "",
            text.rstrip(),
        )


def _take(stream: _Stream, number: int, text: str) -> None:
    if text.endswith(_BEGINS):  # an introduction may precede it
        stream.inside = True
    elif stream.inside:
        if not text.startswith(" ") and _EXCEPTION.match(text):
            stream.inside = False
            if stream.keeps:  # the cause is known already
                stream.keeps = False
                return
            stream.found.append(_LoggedException(number, text))
    elif text in _LINKS and stream.found:
        stream.keeps = _LINKS[text]
        if not stream.keeps:  # a later one replaces the one that was being handled
            stream.found.pop()
    elif stream.found and text.startswith("  ") and stream.found[-1].n_more < MORE:
        last = stream.found[-1]
        last.text, last.n_more = f"{last.text} {text.strip()}", last.n_more + 1
