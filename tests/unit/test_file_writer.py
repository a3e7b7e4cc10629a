"""A file whose parts arrive in any order."""

import errno
import hashlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quantkit.model import file_writer
from quantkit.model.file_writer import FileWriter

HEAD = b"head of twenty bytes"
PLACES = {"a": (0, 1000), "b": (1024, 1500), "c": (1504, 9000), "empty": (9000, 9000)}
SIZE = 9008  # the last part is padded, too


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(file_writer, "FOLLOW_BYTES", 512)
    monkeypatch.setattr(file_writer, "FLUSH_BYTES", 1024)


def pieces(seed):
    """Every part, cut and shuffled, with the file that they make."""
    rng = random.Random(seed)
    whole = bytearray(SIZE)
    cut = []
    for name, (start, end) in PLACES.items():
        data = rng.randbytes(end - start)
        whole[start:end] = data
        at = 0
        while at < len(data):
            n = rng.randint(1, 700)
            cut.append((name, data[at : at + n], at))
            at += n
    rng.shuffle(cut)
    return cut, HEAD + bytes(whole)


@pytest.mark.parametrize("seed", range(5))
def test_parts_in_any_order_from_any_thread_make_the_file_and_its_hash(tmp_path, seed):
    cut, expected = pieces(seed)
    file = FileWriter(tmp_path / "f", HEAD, PLACES, SIZE)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: file.write(*piece), cut))
    assert file.close() == hashlib.sha256(expected).hexdigest()
    assert (tmp_path / "f").read_bytes() == expected


def test_a_writer_that_goes_on_hashes_what_was_there(tmp_path):
    cut, expected = pieces(0)
    first = FileWriter(tmp_path / "f", HEAD, PLACES, SIZE)
    for piece in cut:
        if piece[0] == "b":
            first.write(*piece)
    first.abandon()
    again = FileWriter(tmp_path / "f", HEAD, PLACES, SIZE, present={"b"})
    for piece in cut:
        if piece[0] != "b":
            again.write(*piece)
    assert again.close() == hashlib.sha256(expected).hexdigest()


def test_a_part_that_is_replaced_is_hashed_as_it_is_now(tmp_path):
    cut, expected = pieces(0)
    file = FileWriter(tmp_path / "f", HEAD, PLACES, SIZE)
    for piece in cut:
        file.write(*piece)
    start, end = (len(HEAD) + at for at in PLACES["a"])
    file.replace("a", b"x" * 1000)
    expected = expected[:start] + b"x" * 1000 + expected[end:]
    assert file.close() == hashlib.sha256(expected).hexdigest()
    assert (tmp_path / "f").read_bytes() == expected


def test_a_part_that_is_missing_is_named(tmp_path):
    cut, _ = pieces(0)
    file = FileWriter(tmp_path / "f", HEAD, PLACES, SIZE)
    for piece in cut[:-1]:
        file.write(*piece)
    with pytest.raises(AssertionError, match=f"not written in full.*'{cut[-1][0]}'"):
        file.close()


@pytest.mark.parametrize("seconds", [0.0, 0.2], ids=["on the way", "at the end"])
def test_a_disk_that_fails_while_the_file_grows_fails_the_file(tmp_path, monkeypatch, seconds):
    """The system tells of it once, to the flush on the way: the last one then succeeds."""
    failing = iter([OSError(errno.EIO, "the disk is gone")])

    def flush(file):
        if error := next(failing, None):
            time.sleep(seconds)
            raise error

    monkeypatch.setattr(file_writer, "_flush", flush)
    cut, _ = pieces(0)
    file = FileWriter(tmp_path / "f", HEAD, PLACES, SIZE)
    for piece in cut:
        file.write(*piece)
    with pytest.raises(OSError, match="the disk is gone"):
        file.close()


def test_work_that_failed_leaves_no_thread(tmp_path, monkeypatch):
    """Nor a flush of a file that is closed."""
    begun, is_open = threading.Event(), []

    def flush(file):
        begun.set()
        time.sleep(0.1)
        os.fstat(file)
        is_open.append(True)

    monkeypatch.setattr(file_writer, "_flush", flush)
    before = threading.active_count()
    file = FileWriter(tmp_path / "f", HEAD, PLACES, SIZE)
    for name in ("a", "b"):
        start, end = PLACES[name]
        file.write(name, bytes(end - start))
    assert begun.wait(10)
    file.abandon()
    assert is_open
    assert threading.active_count() == before
