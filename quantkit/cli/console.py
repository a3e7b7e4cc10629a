"""Terminal output: progress and notes on stderr, tables and results on stdout."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from quantkit.cli.lines import Lines
from quantkit.cli.wrapping import HANG, NARROW, fitted, wrapped

if TYPE_CHECKING:
    from rich.console import Console as Screen
    from rich.progress import TaskID
    from rich.table import Table

LONG_NAME = 44
"""Names up to this length in a table's first column never wrap."""
GLUE = "\ue000"


class Console:
    """Draws progress bars on a terminal, and prints lines elsewhere."""

    def __init__(self, verbose: bool = False) -> None:
        from rich.console import Console as Screen

        # Fixed now: silencing a library later must not silence us.
        self._screen = Screen(file=sys.stderr, highlight=False)
        # Not rich's own view of the stream: FORCE_COLOR, as set in build logs, changes that.
        self._lines = None if sys.stderr.isatty() else Lines(self._print)
        self._bars: Any = None
        self._task: TaskID | None = None
        self._lock = threading.Lock()
        self._verbose = verbose

    def start(self, label: str, total: int, unit: str = "bytes") -> None:
        self.finish()
        if self._lines is not None:
            self._lines.start(label, total, unit)
            return
        self._bars = _bars(self._screen, unit)
        self._bars.start()
        self._task = self._bars.add_task(label, total=total)

    def advance(self, amount: int) -> None:
        if self._lines is not None:
            self._lines.advance(amount)
        with self._lock:
            if self._bars is not None and self._task is not None:
                self._bars.advance(self._task, amount)

    def finish(self) -> None:
        if self._lines is not None:
            self._lines.finish()
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None

    def status(self, text: str) -> None:
        if self._lines is not None:
            self._lines.status(text)
        if self._bars is not None:
            self._bars.status = text

    def note(self, text: str) -> None:
        if self._lines is not None:
            self._lines.note(text)
        else:
            self._print(wrapped(text, self._screen.width))

    def detail(self, text: str) -> None:
        if self._verbose:
            self.note(text)

    def _print(self, text: str) -> None:
        self._screen.print(text, markup=False, soft_wrap=True)


@contextmanager
def progress(quiet: bool = False, verbose: bool = False) -> Iterator[Any]:
    """A listener for long work, shut down properly however the work ends."""
    from quantkit.progress import Silent

    listener = Silent() if quiet else Console(verbose)
    try:
        yield listener
    finally:
        listener.finish()


@contextmanager
def loading(quiet: bool = False) -> Iterator[None]:
    """Say on a terminal that libraries are loading; the text is removed when they are."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    screen = sys.stderr
    screen.write("loading PyTorch and transformers ...")
    screen.flush()
    try:
        yield
    finally:
        screen.write("\r\x1b[2K")
        screen.flush()


def say(text: str, err: bool = False, hang: int = HANG) -> None:
    """Print sentences to stdout or stderr, wrapped on a terminal."""
    typer.echo(fitted(text, sys.stderr if err else sys.stdout, hang), err=err)


def width() -> int:
    """Columns of the terminal; without one COLUMNS, or 80."""
    from rich.console import Console as Screen

    return Screen().width


def print_json(data: Any) -> None:
    """Print a result for programs."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def print_lines(heading: str, lines: Sequence[tuple[str, str]]) -> None:
    """Print names and sentences."""
    typer.echo("\n" + lines_text(heading, lines))


def lines_text(heading: str, lines: Sequence[tuple[str, str]]) -> str:
    """A heading, then names and sentences; sentences wrap beside their names."""
    from rich.console import Console as Screen

    screen = Screen()  # the same width as for tables
    columns = screen.width if screen.is_terminal else None
    beside = max((len(name) for name, _ in lines), default=0) + 2
    if columns is not None and columns - beside < max(NARROW, columns // 2):
        beside = 2  # names so long that sentences go below them
    room = None if columns is None else columns - beside
    shown = [heading if columns is None else typer.style(heading, bold=True)]
    for name, sentence in lines:
        parts = wrapped(sentence, room, hang=0).split("\n")
        if len(name) < beside:
            shown.append(f"{name:<{beside}}{parts.pop(0)}".rstrip())
        else:
            shown.append(name)
        shown += [f"{'':<{beside}}{part}" for part in parts]
    return "\n".join(shown)


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)
) -> None:
    """Print a table."""
    typer.echo(table_text(headings, rows, words))


def table_text(
    headings: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)
) -> str:
    """A table; columns in `words` hold text, the others numbers.

    Headings and text may wrap, and so may a long name in the first column; numbers are never cut,
    and a table that is still too wide is left to the terminal. Outside a terminal nothing wraps.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Console as Screen
    from rich.table import Table
    from rich.text import Text

    screen = Screen(highlight=False)
    if not screen.is_terminal:
        screen.width = 400
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    least = []
    for index, heading in enumerate(headings):
        lines = [line for row in rows for line in row[index].split("\n")]
        longest = max(map(cell_len, [*lines, *heading.split()]), default=0)
        parts = [part for line in [*lines, heading] for part in line.split()]
        word = max(map(cell_len, parts), default=0)
        is_text = index in words
        least.append(_least(longest, word, index == 0, is_text))
        table.add_column(
            heading,
            justify="left" if is_text else "right",
            overflow="fold",
            width=max(map(cell_len, [*lines, *heading.split("\n")]), default=0),
        )
    for row in rows:
        # A non-breaking space keeps an amount and its unit on one line.
        table.add_row(*(Text(c if i in words else c.replace(" ", GLUE)) for i, c in enumerate(row)))
    _shrink(table, least, screen)
    with screen.capture() as capture:
        screen.print(table, crop=False)
    text = capture.get().replace(GLUE, " ")
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))


def _least(longest: int, word: int, is_first: bool, is_text: bool) -> int:
    """How narrow a column may get: numbers stay whole, names up to a length, text by its words."""
    if not is_text and not is_first:
        return longest
    return min(longest if is_first else word, LONG_NAME)


def _shrink(table: "Table", least: Sequence[int], screen: "Screen") -> None:
    """Narrow the widest columns until the table fits, none below its least width, or widen the
    screen if that is not enough.

    rich itself takes from all columns alike and then restores every minimum: too wide then.
    """
    from rich.measure import Measurement

    endless = screen.options.update(width=1 << 16)
    excess = Measurement.get(screen, endless, table).maximum - screen.width
    for still in range(excess, 0, -1):
        spare = [c for c, n in zip(table.columns, least, strict=True) if (c.width or 0) > n]
        if not spare:
            screen.width += still
            break
        widest = max(spare, key=lambda column: column.width or 0)
        widest.width = (widest.width or 0) - 1


def compact(amount: float) -> str:
    """An amount for a progress bar in few characters, such as `5.8M`."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e5)):
        if amount >= least:
            return f"{amount / size:,.1f}{unit}"
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.2g}"


def _bars(screen: Any, unit: str) -> Any:
    """A progress bar, with a line of status text below it."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{compact(speed)} {unit}/s" if speed else "")

    class Count(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{compact(task.completed)}/{compact(task.total or 0)} {unit}")

    class Bars(Progress):
        status = ""

        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            if self.status:
                yield Text(self.status, style="dim", overflow="ellipsis", no_wrap=True)

    amounts: list[ProgressColumn]
    if unit == "s":  # a wait, which may end at any moment
        amounts = [TextColumn("{task.completed:,.0f} s, at most {task.total:,.0f} s")]
    elif unit == "bytes":
        amounts = [DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()]
    else:
        amounts = [Count(), Rate(), TimeRemainingColumn()]
    return Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        *amounts,
        console=screen,
        transient=True,
        # A stage may begin while a library's output is redirected: if rich took over the streams
        # then, it would restore them to the redirect, and all later output would be lost.
        redirect_stdout=False,
        redirect_stderr=False,
    )
