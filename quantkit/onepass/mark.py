"""The mark of an unfinished run in its folders: the key of everything that determines its
output.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.errors import StorageError
from quantkit.parsing import parse_json
from quantkit.storage import refuse_existing, write_json

FOLDER = "journal"
KEY = "key.json"
DIGEST = ", digest "
"""In a value of the key: what precedes it is for people."""


def mark(scratch: Path, key: Mapping[str, str]) -> None:
    """Record which run a folder belongs to, until that run is over."""
    (scratch / FOLDER).mkdir(exist_ok=True)
    write_json(scratch / FOLDER / KEY, dict(key))


def key_in(folder: Path) -> Mapping[str, str] | None:
    """The key of the run that a folder belongs to; None if it is over, or there was none."""
    path = folder / FOLDER / KEY
    if not path.is_file():
        return None
    try:
        found = parse_json(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StorageError(f"{path} is damaged; use --force to start over")
    return found


def discard(checkpoint: Path) -> None:
    """Remove the journal of a checkpoint whose run is over."""
    shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)


def refuse_others(targets: Iterable[Path], force: bool) -> None:
    """Stop where something exists that no stopped run can have left."""
    for target in targets:
        if force or key_in(target) is None:
            refuse_existing(target, force)


def blocks_done(target: Path) -> int:
    """Number of blocks that a stopped run has finished for a checkpoint."""
    journal = target.with_name(f".{target.name}.partial") / FOLDER
    return len(list(journal.glob("[0-9]*.json")))
