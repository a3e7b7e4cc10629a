"""Which file of transformers has which class: read from its files once per version, then kept.

Whenever transformers is imported it reads all of its model files twice, some thousand, to learn
their classes: a quarter of what an import costs, and more where the disk is slow. The table depends
on nothing but these files, so it is kept in the user's cache folder, under transformers' version
and place. Development versions are read anew each time, since their files change.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quantkit.errors import StorageError
from quantkit.home import expanded
from quantkit.storage import write_text

MODULE = "transformers.utils.import_utils"
FUNCTION = "create_import_structure_from_path"

Table = dict[Any, Any]
"""By model and file, and by what a file needs: the names of its classes."""


@contextmanager
def kept() -> Iterator[None]:
    """Have transformers take the table from the cache, if it is imported within."""
    finder = _Finder()
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder:
    """Finds the module with the function, and replaces the function once it is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == MODULE else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if callable(found := getattr(module, FUNCTION, None)):
                    setattr(module, FUNCTION, _Kept(found, Path(str(module.__file__)).parents[1]))

            loader.exec_module = exec_module
        return spec


class _Kept:
    """The same function, which looks into the cache first when it is asked for all models."""

    def __init__(self, read: Callable[[Any], Table], package: Path) -> None:
        self._read, self._package = read, package
        self._rows: list[Any] | None = None

    def __call__(self, module_path: Any) -> Table:
        folder = Path(module_path)
        folder = folder.parent if folder.name == "__init__.py" else folder
        if folder != self._package / "models":
            return self._read(module_path)
        if self._rows is None:
            file = _file(self._package)
            self._rows = _stored(file) or self._read_and_kept(module_path, file)
        return as_table(self._rows)

    def _read_and_kept(self, module_path: Any, file: Path | None) -> list[Any]:
        rows = as_rows(self._read(module_path))
        if file is not None:
            with suppress(OSError, StorageError):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps(rows))
        return rows


def _file(package: Path) -> Path | None:
    """Where the table of this installation lies; None where it should not be kept."""
    from importlib import metadata

    version = metadata.version("transformers")
    if "dev" in version:
        return None
    place = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    changed = (package / "models").stat().st_mtime_ns
    with suppress(StorageError):  # a home folder is not known
        folder = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "quantkit"
        return folder / f"transformers-{version}-{place}-{changed}.json"
    return None


def _stored(file: Path | None) -> list[Any] | None:
    if file is None:
        return None
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        return rows if as_table(rows) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def as_rows(table: Table) -> list[Any]:
    """A table in JSON's types: a list of keys and what they lead to."""
    return [
        [sorted(key), {name: sorted(classes) for name, classes in found.items()}]
        if isinstance(key, frozenset)
        else [key, as_rows(found)]
        for key, found in table.items()
    ]


def as_table(rows: list[Any]) -> Table:
    """The inverse of `as_rows`."""
    return {
        frozenset(key) if isinstance(key, list) else key: {n: set(c) for n, c in found.items()}
        if isinstance(key, list)
        else as_table(found)
        for key, found in rows
    }
