"""How the plan of a server looks on a terminal, and its files."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quantkit.errors import StorageError

if TYPE_CHECKING:
    from quantkit.serving.plan import Plan
    from quantkit.serving.program import Program

SHORT = 40
"""Characters of a flag that stand before its reason."""


def show(made: "Plan", engine: "Program | None" = None) -> None:
    """The command as it can be copied, then the reason of each flag."""
    from quantkit.cli import console

    typer.echo(made.shell(engine.words if engine else None))
    lines = [(_short(flag.words), flag.why) for flag in made.flags]
    console.print_lines(f"Why, for {made.where}:", lines)
    if made.notes:
        console.print_lines("Mind:", [("-", note) for note in made.notes])


def _short(words: tuple[str, ...]) -> str:
    text = " ".join(words)
    return text if len(text) <= SHORT else words[0]


def write_files(made: "Plan", kind: str, out: Path | None, ttft: float, force: bool) -> None:
    """What an orchestrator reads, into a folder."""
    from quantkit.serving import emit
    from quantkit.storage import guarded, write_text

    folder = out or Path()
    files = emit.files(made, kind, ttft)
    if taken := [name for name in files if (folder / name).exists() and not force]:
        raise StorageError(f"{folder / taken[0]} exists already; use --force to replace it")
    with guarded(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text(folder / name, text)
        typer.echo(folder / name)
