"""Write docs/help.md: the help text of every command, as the program prints it."""

import contextlib
import io
import os
from pathlib import Path

os.environ["COLUMNS"] = "80"
os.environ["TERMINAL_WIDTH"] = "80"

from quantkit.cli.main import app, main

PAGE = Path(__file__).parent.parent / "docs" / "help.md"


def help_of(*command: str) -> str:
    """What `quantkit COMMAND --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        main([*command, "--help"])
    return screen.getvalue().rstrip()


def commands() -> list[tuple[str, ...]]:
    """Every command, subcommands after their group."""
    found: list[tuple[str, ...]] = [()]
    found += [(str(c.name),) for c in app.registered_commands]
    for group in app.registered_groups:
        found.append((str(group.name),))
        assert group.typer_instance is not None
        found += [(str(group.name), str(c.name)) for c in group.typer_instance.registered_commands]
    return found


def page() -> str:
    """The whole page."""
    parts = ["# Commands\n\nMade by `make docs` from the program itself.\n"]
    for command in commands():
        title = " ".join(("quantkit", *command))
        parts.append(f"## {title}\n\n```\n{help_of(*command)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
