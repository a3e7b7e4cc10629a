"""Atomic file output, and plain messages for disk errors."""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import HardwareError, QuantkitError, StorageError
from quantkit.lock import INSIDE, abandoned, sole_writer

HALF = re.compile(r"\..+\.(json|md|html|csv|parquet|svg|yaml)\.(\d+|partial)")
"""Unfinished files, as named by `write_text` and others."""
MANIFEST = "quantkit.json"
"""The file that marks a finished checkpoint."""
DEQUANTIZED = "dequantized.json"
"""Records in a plain model folder which quantised model it was made from."""
IMATRIX = "imatrix.gguf"
"""The importance matrix stored beside a GGUF file that was made with it."""


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that hold models: all but importance matrices."""
    return [file for file in sorted(folder.glob("*.gguf")) if not file.name.startswith("imatrix")]


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turn the operating system's write errors below `path` into one clear sentence."""
    try:
        yield
    except OSError as error:
        reason = {
            errno.ENOSPC: f"the disk that holds {path} is full; free some space and try again",
            errno.EDQUOT: f"the quota for {path} is used up; free some space and try again",
            errno.EACCES: f"no permission to write {path}; choose another --out",
            errno.EPERM: f"no permission to write {path}; choose another --out",
            errno.EROFS: f"{path} is on a read-only file system; choose another --out",
            errno.EFBIG: f"the file system of {path} does not take files this large",
            errno.ENOTDIR: f"{path} cannot be a folder: part of its path is a file",
            errno.EEXIST: f"{path} cannot be a folder: a file of that name exists",
        }.get(error.errno or 0)
        reason = reason or f"cannot write {path}: {error.strerror or error}"
        raise StorageError(reason) from error


def require_space(folder: Path, needed_bytes: int, words: str = "") -> None:
    """Fail early if the disk cannot hold the result; `words` precede its size in the message."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise StorageError(
            f"{folder} needs {words}{gib(needed_bytes)} but its disk has {gib(free)} free; "
            "free some space or choose another --out"
        )


def require_writable(folder: Path) -> None:
    """Fail early if a folder cannot be created or written to; creates nothing."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    number = errno.EACCES
    if not existing.is_dir():
        number = errno.EEXIST if existing == folder.absolute() else errno.ENOTDIR
    elif os.access(existing, os.W_OK | os.X_OK) and shutil.disk_usage(existing).total:
        return  # /proc and the like admit root but cannot hold files
    with guarded(folder):
        raise OSError(number, os.strerror(number))


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, data: Any, allow_nan: bool = False) -> None:
    """Write JSON to a temporary sibling and rename it, so that readers never see a partial file."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=allow_nan)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write text to a temporary sibling and rename it."""
    if not path.name or path.is_dir():
        raise StorageError(f"cannot write {path}: it is a folder; name a file")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with guarded(path):
        clear_halves_of(path)
        try:
            with scratch.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def clear_halves_of(path: Path) -> None:
    """Remove partial files for this name left by killed processes of this machine."""
    for half in path.parent.glob(f".{glob.escape(path.name)}.*"):
        number = half.name.rpartition(".")[2]
        if number.isdecimal() and not _is_alive(int(number)):
            half.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def scratch_folder(
    target: Path, force: bool = False, resumable: bool = False, marker: str = MANIFEST
) -> Iterator[Path]:
    """A folder that takes the name `target` only once its contents are complete.

    An existing target is refused before any work, unless `force`; even then only a finished folder
    replaces it. A resumable folder keeps its name and, when the work is interrupted, its contents;
    without `force` the next call resumes them. Nothing is removed before the lock is held: it may
    belong to another run.
    """
    with claimed(target, force, marker):
        scratch = target.with_name(f".{target.name}.{'partial' if resumable else 'scratch'}")
        if scratch.exists() and (force or not resumable):
            shutil.rmtree(scratch)
        scratch.mkdir(exist_ok=True)
        yield from _filled(scratch, target, resumable)


@contextmanager
def claimed(target: Path, force: bool = False, marker: str = MANIFEST) -> Iterator[None]:
    """Hold a folder's name, which must be free unless `force`, before the work for it begins."""
    refuse_existing(target, force, marker)
    with guarded(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(target.parent)
        with sole_writer(target.with_name(f".{target.name}.lock"), target):
            _restore(target)
            refuse_existing(target, force, marker)  # another run may have finished it
            yield


def _clear_abandoned(folder: Path) -> None:
    """Remove what killed runs left here and nobody can resume: locks and scratch folders."""
    for lock in abandoned(folder):
        scratch = lock.with_name(lock.name.removesuffix(".lock") + ".scratch")
        shutil.rmtree(scratch, ignore_errors=True)


def _filled(scratch: Path, target: Path, resumable: bool) -> Iterator[Path]:
    keep = False
    try:
        _clear_halves(scratch)
        try:
            yield scratch
        except BaseException as error:
            # A fault in the input would only recur.
            ours = isinstance(error, QuantkitError)
            keep = resumable and (not ours or isinstance(error, StorageError | HardwareError))
            keep = keep and any(scratch.iterdir())
            raise
        sync_folder(scratch)
        retired = _retired(target)
        if target.exists():
            target.rename(retired)
        try:
            scratch.rename(target)
        except OSError:
            if retired.exists():
                retired.rename(target)  # the old one is better than none
            raise
        sync_folder(target.parent)
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)


def lasting_name(folder: Path) -> str:
    """A folder's name, also while `scratch_folder` fills it under another one."""
    name = folder.resolve().name
    found = re.fullmatch(r"\.(.+)\.(?:partial|scratch)", name)
    return found[1] if found else name


def _retired(target: Path) -> Path:
    """Where the folder that `--force` replaces is kept until the new one has its name."""
    return target.with_name(f".{target.name}.replaced")


def _restore(target: Path) -> None:
    """Undo or finish a replacement that a kill cut short."""
    retired = _retired(target)
    if retired.exists() and not target.exists():
        retired.rename(target)
    elif retired.exists():
        shutil.rmtree(retired)


def _clear_halves(folder: Path) -> None:
    """Remove the unnamed output of a killed run."""
    for path in folder.rglob(".*"):
        if path.is_file():
            path.unlink()


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Create a folder that a command fills file by file, and lock it against a second writer."""
    is_new = not folder.exists()
    with guarded(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with sole_writer(folder / INSIDE, folder):
                _clear_written_halves(folder)
                yield
        finally:
            if is_new and not any(folder.iterdir()):
                folder.rmdir()


def _clear_written_halves(folder: Path) -> None:
    """Remove partial files in a folder we hold, which nobody else writes."""
    for path in folder.glob(".*"):
        if HALF.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            path.unlink()


def refuse_existing(target: Path, force: bool, marker: str = MANIFEST) -> None:
    """Stop if the output exists; never replace what quantkit did not make."""
    if not target.exists():
        return
    if not (target / marker).is_file():
        known = {MANIFEST: "checkpoint", DEQUANTIZED: "model folder"}
        what = known.get(marker, "calibration set")
        raise StorageError(
            f"{target} exists already and is not a {what} made by quantkit, so that not even "
            "--force replaces it; choose another --out"
        )
    if not force:
        raise StorageError(f"{target} exists already; use --force to replace it, or another --out")


def sync_folder(folder: Path) -> None:
    """Flush renames and new files in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def gib(size_bytes: float) -> str:
    """A size for display: MiB below one GiB, GiB above."""
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / (1 << 30):.2f} GiB"


def duration(seconds: float) -> str:
    """A duration for display."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
