"""A verdict as Markdown: for a job's summary and a pull request's comment."""

from quantkit.gating import words
from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Check, Verdict

MOST_ROWS = 300
"""A job's summary may have one MiB, a comment 65,536 characters."""
MOST_CHARACTERS = 60_000
SAFE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;()%+-/=")
HEADINGS = ("candidate", "metric", "value", "limit", "answer")


def render(verdict: Verdict) -> str:
    """The verdict, sentences on what did not pass, then the table, truncated if too long."""
    words_on = [
        f"- **{answer}**: {safe(names)}: {safe(reason)}"
        for answer in (Answer.FAIL, Answer.CANNOT_TELL)
        for names, reason in words.reasons(verdict.of(answer))
    ]
    lines = [f"## quantkit gate: {safe(words.last_line(verdict))}", ""]
    lines += [*words_on[:MOST_ROWS], ""] if words_on else []
    lines += [f"- {safe(note)}" for note in verdict.notes] + [""] * bool(verdict.notes)
    # Failures come first, so that they are never truncated.
    ordered = sorted(verdict.checks, key=lambda check: check.answer is Answer.PASS)
    rows = [_row(check) for check in ordered]
    room = MOST_CHARACTERS - 200 - sum(len(line) + 1 for line in lines)
    kept: list[str] = []
    for row in rows[:MOST_ROWS]:
        room -= len(row) + 1
        if room < 0:
            break
        kept.append(row)
    lines += [f"| {' | '.join(HEADINGS)} |", "| --- | --- | ---: | --- | --- |", *kept, ""]
    if len(kept) < len(rows):
        lines += [f"{len(rows) - len(kept)} more checks are not shown.", ""]
    return _cut("\n".join(lines))


def render_error(message: str) -> str:
    """The message that the gate could not judge, and why."""
    lines = "\n".join(f"- {safe(line.strip())}" for line in message.splitlines() if line.strip())
    return _cut(f"## quantkit gate: could not judge\n\n{lines}\n")


def safe(text: str) -> str:
    """Foreign text without markup, columns, links or mentions."""
    found = []
    for char in plain(text):
        mark = char if char in SAFE or ord(char) > 127 else f"&#{ord(char)};"
        # Platforms expand @names and #numbers again after the markup.
        found.append(f"{mark}&#8203;" if char in "@#!$~&" else mark)
    return "".join(found).replace("www.", "www&#46;").replace("://", "&#58;//")


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    lines, room = [], MOST_CHARACTERS
    for line in text.split("\n"):
        room -= len(line) + 1
        if room < 0:
            break
        lines.append(line)
    return "\n".join([*lines, "", "The rest is not shown.", ""])


def _row(check: Check) -> str:
    answer = str(check.answer) if check.answer is Answer.PASS else f"**{check.answer}**"
    cells = (check.candidate, words.metric(check), words.amount(check), words.limit(check))
    return f"| {' | '.join(map(safe, cells))} | {answer} |"
