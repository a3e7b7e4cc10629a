"""Wraps sentences to the terminal's width; in a pipe or a file they stay as they are.

What a user may want to copy is kept in one piece where possible: a path or an option is one word,
`text between backquotes` is too, and a line that is a command is left alone, since a terminal that
wraps a long line itself joins it again when it is copied. Help texts keep options and names whole,
too.
"""

import os
import re
import textwrap
from collections.abc import Iterable
from typing import IO, Any

HANG = 2
"""Indent of a sentence's continuation lines."""
NARROW = 30
"""A terminal narrower than this is left to wrap lines itself."""
COMMAND = re.compile(
    r"\s*(\$ )?(quantkit|pip|python3?|torchrun|vllm|llama-server|docker|kubectl|curl) \S.* -"
)
"""A program's name followed by an option; sentences may begin with such a name, too."""
GLUE = "\ue000"


def columns_of(stream: IO[str]) -> int | None:
    """Columns of the terminal that a stream writes to; None if it is not a terminal."""
    try:
        if not stream.isatty():
            return None
        columns = os.environ.get("COLUMNS", "")
        return (
            int(columns)
            if columns.isdecimal() and int(columns)
            else os.get_terminal_size(stream.fileno()).columns
        )
    except (OSError, ValueError):  # closed, or not a local terminal
        return None


def wrapped(text: str, columns: int | None, hang: int = HANG) -> str:
    """Text with no line longer than a terminal, as far as its words allow."""
    if columns is None or columns < NARROW:
        return text
    return "\n".join(_line(line, columns, hang) for line in text.split("\n"))


def fitted(text: str, stream: IO[str], hang: int = HANG) -> str:
    """The same for the terminal of a stream."""
    return wrapped(text, columns_of(stream), hang)


def _line(line: str, columns: int, hang: int) -> str:
    if len(line) <= columns or COMMAND.match(line):
        return line
    lead = " " * (len(line) - len(line.lstrip()))
    # Pieces that fit on a line of their own are worth keeping whole.
    room = columns - hang - len(lead)
    glued = re.sub(
        r"`[^`\n]+`",
        lambda found: found[0].replace(" ", GLUE) if len(found[0]) <= room else found[0],
        line,
    )
    parts = textwrap.wrap(
        glued.strip(),
        columns,
        initial_indent=lead,
        subsequent_indent=lead + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts).replace(GLUE, " ")


def keep_hyphens(command: Any) -> Any:
    """A command whose help, and that of its subcommands, never breaks a line after a hyphen.

    Typer's formatter would part `--min-quality`, and takes no option against it.
    """
    context = command.context_class
    formatter = type("Formatter", (_Whole, context.formatter_class), {})
    command.context_class = type("Context", (context,), {"formatter_class": formatter})
    for child in getattr(command, "commands", {}).values():
        keep_hyphens(child)
    return command


class _Whole:
    """What a help formatter does otherwise: hyphens are out of sight while it wraps."""

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", GLUE))  # type: ignore[misc]

    def write_dl(self, rows: Iterable[tuple[str, str]], *args: Any, **kwargs: Any) -> None:
        glued = [(name, text.replace("-", GLUE)) for name, text in rows]
        super().write_dl(glued, *args, **kwargs)  # type: ignore[misc]

    def write(self, string: str) -> None:
        super().write(string.replace(GLUE, "-"))  # type: ignore[misc]
