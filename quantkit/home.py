"""Expansion of paths that begin with `~`."""

from pathlib import Path

from quantkit.errors import StorageError


def expanded(path: str | Path) -> Path:
    """A path with `~` replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user, or one unknown to the system
        raise StorageError(
            f"cannot expand {path}: unknown user; set HOME, or give the path without ~"
        ) from error
