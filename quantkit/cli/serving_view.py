"""How the plan of a server looks on a terminal, and its files."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from quantkit.serving.fleet import Fleet
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


def made_files(
    made: "Plan", kind: str, folder: Path, fleet: "Fleet", force: bool
) -> dict[Path, str]:
    """What an orchestrator reads, by path; refused where others lie there."""
    from quantkit.serving import emit

    files = {folder / name: text for name, text in emit.files(made, kind, fleet).items()}
    emit.refuse_changed(files, force)
    return files


def write_files(files: dict[Path, str], only_named: bool = False) -> None:
    """Write them and name them, or name what would be written."""
    if only_named:
        for path in files:
            typer.echo(f"would write {path}")
        return
    from quantkit.storage import guarded, write_text

    for path, text in files.items():
        with guarded(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        typer.echo(path)
