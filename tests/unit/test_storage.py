import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest

from quantkit.errors import StorageError
from quantkit.storage import (
    MANIFEST,
    gib,
    guarded,
    refuse_existing,
    require_space,
    scratch_folder,
    sha256_of,
    write_json,
    write_text,
)


def finished(folder: Path, text: str = "old") -> Path:
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    (folder / "weights").write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_json_round_trip(tmp_path):
    data = {"a": [1, 2.5, None], "ü": "é"}
    write_json(tmp_path / "x.json", data)
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == data
    assert names(tmp_path) == ["x.json"]


def test_write_text_replaces(tmp_path):
    path = tmp_path / "x.md"
    path.write_text("a much longer old text")
    write_text(path, "new")
    assert path.read_text() == "new"


def test_json_without_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert names(tmp_path) == []


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"x\.json is full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["x.json"]


def test_write_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="part of its path is a file"):
        write_text(tmp_path / "file" / "x.json", "new")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "is full; free some space"),
        (errno.EDQUOT, "quota for /some/out is used up"),
        (errno.EACCES, "no permission to write /some/out; choose another --out"),
        (errno.EPERM, "no permission to write /some/out; choose another --out"),
        (errno.EROFS, "read-only"),
        (errno.EFBIG, "does not take files this large"),
        (errno.ENOTDIR, "part of its path is a file"),
        (errno.EEXIST, "a file of that name exists"),
        (errno.EIO, "/some/out"),
        (errno.ENAMETOOLONG, "/some/out"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_refusals_of_the_system_become_a_sentence(number, words):
    with pytest.raises(StorageError) as caught, guarded(Path("/some/out")):
        raise OSError(number, os.strerror(number))
    assert words in str(caught.value)
    assert "/some/out" in str(caught.value)
    assert caught.value.__cause__.errno == number


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_device_that_is_really_full():
    with pytest.raises(StorageError, match="full"), guarded(Path("/dev/full")):
        Path("/dev/full").write_text("x")


def test_file_that_is_really_too_large(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(StorageError, match="files this large"):
            write_text(tmp_path / "x", "x" * (1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_other_exceptions_pass_guarded():
    with pytest.raises(KeyError), guarded(Path("/some/out")):
        raise KeyError("x")


def test_scratch_folder_appears_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with scratch_folder(target) as scratch:
        (scratch / "weights").write_text("new")
        assert not target.exists()
        assert scratch.parent == target.parent
    assert (target / "weights").read_text() == "new"
    assert names(target.parent) == ["out"]


def write_half(target: Path, failure: BaseException) -> None:
    with scratch_folder(target) as scratch:
        (scratch / "weights").write_text("half")
        raise failure


@pytest.mark.parametrize("failure", [RuntimeError(), KeyboardInterrupt(), SystemExit()], ids=repr)
def test_scratch_folder_leaves_nothing_on_failure(tmp_path, failure):
    with pytest.raises(type(failure)):
        write_half(tmp_path / "out", failure)
    assert names(tmp_path) == []


def test_full_disk_inside_scratch_folder(tmp_path):
    with pytest.raises(StorageError, match="out is full"):
        write_half(tmp_path / "out", OSError(errno.ENOSPC, "No space left on device"))
    assert names(tmp_path) == []


def test_existing_target_is_refused_before_the_work(tmp_path):
    finished(tmp_path / "out")
    with pytest.raises(StorageError, match="exists already; use --force"):
        scratch_folder(tmp_path / "out").__enter__()
    assert names(tmp_path) == ["out"]


def test_force_replaces_only_when_finished(tmp_path):
    target = finished(tmp_path / "out")
    with scratch_folder(target, force=True) as scratch:
        (scratch / "weights").write_text("new")
        assert (target / "weights").read_text() == "old"
    assert (target / "weights").read_text() == "new"
    assert names(tmp_path) == ["out"]
    assert names(target) == ["weights"]


def test_failure_under_force_keeps_the_old_folder(tmp_path):
    target = finished(tmp_path / "out")
    with pytest.raises(RuntimeError), scratch_folder(target, force=True):
        raise RuntimeError
    assert names(target) == sorted([MANIFEST, "weights"])
    assert names(tmp_path) == ["out"]


def test_failed_rename_under_force_keeps_the_old_folder(tmp_path, monkeypatch):
    target = finished(tmp_path / "out")
    rename = Path.rename

    def failing(path, new):
        if ".scratch" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(StorageError), scratch_folder(target, force=True):
        pass
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_force_never_replaces_what_is_not_ours(tmp_path, make):
    target = tmp_path / "out"
    make(target)
    with pytest.raises(StorageError, match="not a checkpoint made by quantkit"):
        refuse_existing(target, force=True)


def test_leftover_scratch_of_a_killed_run_is_cleared(tmp_path):
    finished(tmp_path / ".out.scratch")
    with scratch_folder(tmp_path / "out") as scratch:
        assert names(scratch) == []
    assert names(tmp_path) == ["out"]


def test_a_half_written_file_of_a_killed_run_does_not_stay(tmp_path):
    scratch = tmp_path / ".out.partial"
    (scratch / "journal").mkdir(parents=True)
    (scratch / "journal" / "00000.json").write_text("{}")
    for path in (scratch / ".config.json.4711", scratch / "journal" / ".00001.json.4711"):
        path.write_text("{")
    with scratch_folder(tmp_path / "out", resumable=True) as folder:
        (folder / "config.json").write_text("{}")
    found = sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert found == ["00000.json", "config.json"]


def test_require_space_looks_at_the_nearest_folder(tmp_path, monkeypatch):
    asked = []

    def usage(path):
        asked.append(path)
        return shutil._ntuple_diskusage(100, 90, 10)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    require_space(tmp_path / "a" / "b", 10)
    assert asked == [tmp_path]
    with pytest.raises(StorageError, match="free some space"):
        require_space(tmp_path / "a" / "b", 11)


def test_require_space_gives_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, 3 << 20)
    )
    with pytest.raises(StorageError, match=r"needs 2\.00 GiB but its disk has 3\.0 MiB free"):
        require_space(tmp_path, 2 << 30)


def test_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_of(tmp_path / "x").startswith("ba7816bf8f01cfea")


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0.0 MiB"), ((1 << 30) - 1, "1024.0 MiB"), (1 << 30, "1.00 GiB"), (5 << 29, "2.50 GiB")],
)
def test_gib(size, words):
    assert gib(size) == words
