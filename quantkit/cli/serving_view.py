"""Terminal output of a server's plan and its files."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from quantkit.calls.serve import Planned
    from quantkit.serving.plan import Plan
    from quantkit.serving.program import Program
    from quantkit.serving.server import Answer, Server

SHORT = 40
"""Longest flag that is printed on the same line as its reason."""
PREVIEW = 60
"""Characters of an answer."""


def show(made: "Plan", engine: "Program | None" = None) -> None:
    """The command, ready to copy, then the reason for each flag."""
    from quantkit.cli import console

    typer.echo(made.shell(engine.words if engine else None))
    lines = [(_short(flag.words), flag.why) for flag in made.flags]
    console.print_lines(f"Why, for {made.where}:", lines)
    if made.notes:
        console.print_lines("Notes:", [("-", note) for note in made.notes])


def _short(words: tuple[str, ...]) -> str:
    text = " ".join(words)
    return text if len(text) <= SHORT else words[0]


def show_files(paths: "Iterable[Path]", only_named: bool = False) -> None:
    """The files that were written, or would be."""
    for path in paths:
        typer.echo(f"would write {path}" if only_named else path)


@dataclass(frozen=True)
class View:
    """Reports a server's start, on the terminal or as JSON."""

    as_json: bool

    def show(self, planned: "Planned") -> None:
        """The plan alone."""
        from quantkit.cli import console

        if self.as_json:
            engine = planned.engine
            console.print_json(planned.plan.to_json(engine.words if engine else None))
        else:
            show(planned.plan, planned.engine)

    def planned(self, planned: "Planned") -> None:
        if not self.as_json:
            show(planned.plan, planned.engine)

    def answered(self, planned: "Planned", running: "Server", answer: "Answer") -> None:
        from quantkit.cli import console
        from quantkit.serving import server

        plan, engine = planned.plan, planned.engine
        assert engine is not None
        if self.as_json:
            console.print_json(
                {
                    **plan.to_json(engine.words),
                    "version": engine.named,
                    "url": running.url,
                    "start_seconds": running.seconds,
                    "answer": answer.text,
                    "answer_seconds": answer.seconds,
                }
            )
            return
        shown = repr(answer.text if len(answer.text) <= PREVIEW else answer.text[:PREVIEW])
        typer.echo(
            f"\n{engine.named} was ready after {running.seconds:.0f} s and "
            f"answered {server.PROMPT!r} in {answer.seconds:.1f} s with:\n  {shown}\n"
        )
        typer.echo(f"Call it:\n{server.curl(plan, running.url)}")
