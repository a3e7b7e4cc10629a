"""What may have been meant by a path that is not there, or is not a model."""

from pathlib import Path

from quantkit.errors import either, near_matches

MOST = 5
"""Folders to name, so that a hint stays a sentence."""


def similar(path: Path, files: bool = False) -> str:
    """A hint at folders beside a missing one with a similar name, or also at files; empty if there
    are none.
    """
    found = near_matches(path.name, _names(path.parent, files))
    return f". Did you mean {either([str(path.parent / name) for name in found])}?" if found else ""


def within(folder: Path, marker: str) -> str:
    """A hint if the parent of folders with such a file was named; empty if it has none."""
    found = [name for name in _names(folder) if (folder / name / marker).is_file()]
    return f"; those within are {', '.join(found[:MOST])}: name one of them" if found else ""


def _names(parent: Path, files: bool = False) -> list[str]:
    try:
        visible = (path for path in parent.iterdir() if not path.name.startswith("."))
        return sorted(path.name for path in visible if files or path.is_dir())
    except OSError:  # neither can be read: there is nothing to offer
        return []
