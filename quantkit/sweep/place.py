"""Where results are stored: a folder on any file system of fsspec, local, NFS, S3 or GCS.

Files appear atomically. Object stores guarantee that for every upload; on disks a file is written
under a temporary name and renamed.
"""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit.errors import MissingDependency, QuantkitError, StorageError
from quantkit.home import expanded
from quantkit.storage import guarded, require_space, sync_folder

EXCLUSIVE = frozenset({"file", "local", "memory", "s3", "s3a", "gs", "gcs", "abfs", "az"})
"""File systems on which the second of two writers is refused."""


HALF = re.compile(r"\..+\.[0-9a-f]{8}\.half")
"""Temporary files that have not been renamed yet."""


class Place:
    """A folder by its path or address."""

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)
        self._fs, self._root = _opened(self.address)

    def __reduce__(self) -> Any:  # connections cannot be pickled
        return Place, (self.absolute,)

    @cached_property
    def local(self) -> Path | None:
        """The folder, if it is on this machine."""
        return Path(self._root) if self.protocol in ("file", "local") else None

    @property
    def absolute(self) -> str:
        """An address that means the same from any working directory."""
        return str(self.local.absolute()) if self.local else self.address

    @cached_property
    def protocol(self) -> str:
        found = self._fs.protocol
        return str(found if isinstance(found, str) else found[0])

    def path_of(self, name: str = "") -> str:
        """A file's address, for messages."""
        return f"{self.address.rstrip('/')}/{name}" if name else self.address

    def read(self, name: str) -> bytes | None:
        """A file's content; None if it does not exist."""
        with self._explained(name, "read"):
            try:
                if (root := self.local) is not None:
                    return (root / name).read_bytes()
                return bytes(self._fs.cat_file(self._path(name)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Many small files; missing ones are left out."""
        names = list(names)
        if self.local or len(names) < 2:
            found = {name: self.read(name) for name in names}
            return {name: content for name, content in found.items() if content is not None}
        with self._explained("", "read"):  # remote ones are read in parallel
            paths = {self._path(name): name for name in names}
            contents: Mapping[str, Any] = self._fs.cat(list(paths), on_error="return")
            read = {}
            for path, content in contents.items():
                if isinstance(content, FileNotFoundError | NotADirectoryError):
                    continue
                if isinstance(content, Exception):  # it may exist: making it again is expensive
                    raise content
                read[paths[path]] = bytes(content)
            return read

    def write(self, name: str, content: bytes) -> None:
        """Write a file, replacing any existing one."""
        if (root := self.local) is None:
            with self._explained(name, "write"):
                self._fs.pipe_file(self._path(name), content)
            return
        path = root / name
        with guarded(path), _half(path, content) as half:
            half.replace(path)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; returns whether this call did."""
        if (root := self.local) is not None:
            path = root / name
            with guarded(path), _half(path, content) as half:
                try:
                    os.link(half, path)  # atomic, and refused if the name is taken
                except FileExistsError:
                    return False
            return True
        with self._explained(name, "write"):
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            return True

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty where there is no folder."""
        with self._explained(folder, "read"):
            try:
                if (root := self.local) is not None:
                    there = (path.name for path in (root / folder).iterdir())
                    return sorted(name for name in there if not name.startswith("."))
                found = self._fs.ls(self._path(folder), detail=False, refresh=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        inside = (PurePosixPath(str(path)).name for path in found)
        return sorted(name for name in inside if not name.startswith("."))

    def sizes(self, folder: str, names: Iterable[str]) -> dict[str, int]:
        """Bytes of files below a folder; missing ones are left out."""
        found: dict[str, int] = {}
        if (root := self.local) is not None:
            for name in names:
                with suppress(FileNotFoundError, NotADirectoryError):
                    found[name] = (root / folder / name).stat().st_size
            return found
        with self._explained(folder, "read"):
            base = self._path(folder)
            try:
                there = self._fs.find(base, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        cut = len(self._fs._strip_protocol(base).rstrip("/")) + 1
        sizes = {str(path)[cut:]: int(info["size"]) for path, info in there.items()}
        return {name: sizes[name] for name in names if name in sizes}

    def publish(self, folder: Path, name: str) -> None:
        """Move a finished folder there; its name must be new."""
        if (root := self.local) is not None:
            target = root / name
            with guarded(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(folder, target)
                sync_folder(target.parent)
            return
        with self._explained(name, "write"):
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    inside = path.relative_to(folder).as_posix()
                    self._fs.put_file(str(path), self._path(f"{name}/{inside}"))
        shutil.rmtree(folder)

    def fetch(self, name: str, target: Path) -> bool:
        """Copy one file to this machine; returns whether it exists."""
        with guarded(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with self._explained(name, "read"):
            try:
                self._fs.get_file(self._path(name), str(target))
            except FileNotFoundError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if it exists."""
        with self._explained(name, "remove"):
            try:
                self._fs.rm(self._path(name), recursive=True)
            except FileNotFoundError:
                return

    def require(self, needed_bytes: int) -> None:
        """Refuse before the work where nothing can be written, or too little.

        Leftovers of killed writers are removed first.
        """
        if (root := self.local) is not None:
            _clear_halves(root)
            with guarded(root / "probe"), _half(root / "probe", b"quantkit"):
                require_space(root, needed_bytes)
            return
        probe = f".probe-{uuid.uuid4().hex[:8]}"
        self.write(probe, b"quantkit")
        self.remove(probe)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _explained(self, name: str, verb: str) -> Iterator[None]:
        """Turn errors of a disk or a bucket into one sentence."""
        try:
            yield
        except QuantkitError:
            raise
        except PermissionError as error:
            raise StorageError(
                f"no permission to {verb} {self.path_of(name)}; check the account, or choose "
                "another --out"
            ) from error
        except FileNotFoundError as error:
            raise StorageError(
                f"{self.path_of(name)} is not there: {error}; check the name of the bucket or "
                "folder"
            ) from error
        except Exception as error:  # bucket libraries have their own errors
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise StorageError(f"cannot {verb} {self.path_of(name)}: {first}") from error


@contextmanager
def _half(path: Path, content: bytes) -> Iterator[Path]:
    """A temporary file with that content next to `path`, removed at the end unless renamed.

    Its lock distinguishes it from those of killed writers, on other machines of a shared disk, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.half")
    try:
        with half.open("wb") as stream:
            with suppress(OSError):  # a disk without locks keeps the leftovers
                fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            if not half.exists():  # mistaken for a leftover before it was locked
                half.write_bytes(content)
            yield half
    finally:
        half.unlink(missing_ok=True)


def _clear_halves(root: Path) -> None:
    """Remove temporary files whose writer is gone."""
    for path in root.rglob(".*.half"):
        if HALF.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with suppress(OSError), path.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _opened(address: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.registry import known_implementations

    scheme, found, _ = address.partition("://")
    if not found:
        return fsspec.filesystem("file"), str(expanded(address).absolute())
    try:
        fs, root = fsspec.core.url_to_fs(address)
    except ImportError as error:
        package = str(known_implementations.get(scheme, {}).get("class", scheme)).partition(".")[0]
        raise MissingDependency(
            f"{scheme}:// needs the package {package}; install it: pip install {package}"
        ) from error
    except ValueError as error:
        raise StorageError(
            f"{address}: unknown storage {scheme}://; give a folder or a bucket such as s3:// or gs://"
        ) from error
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise StorageError(f"cannot open {address}: {first}") from error
    return fs, str(root).rstrip("/")
