"""Paths that begin with `~`."""

from pathlib import Path

from quantkit.errors import StorageError


def expanded(path: str | Path) -> Path:
    """A path with the home folder in place of its `~`."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user, or one whom the system does not know
        raise StorageError(
            f"cannot expand {path}: unknown user; set HOME, or give the path without ~"
        ) from error
