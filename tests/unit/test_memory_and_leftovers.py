"""What is said when memory runs out, and what killed runs leave behind."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from quantkit import lock, storage
from quantkit.cli.main import main
from quantkit.device import out_of_memory


def raised(function):
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: torch.empty(1 << 50), "4194304.00 GiB more were needed"),
        (lambda: np.empty(1 << 50), "8.00 PiB more were needed"),
        (lambda: b"a" * (1 << 62), "are free"),
    ],
    ids=["torch", "numpy", "python"],
)
def test_a_lack_of_memory_says_how_much_and_what_to_do(function, words, monkeypatch, capsys):
    told = out_of_memory(raised(function))
    assert told.startswith("out of memory: ")
    assert words in told
    assert "smaller batches or fewer samples" in told
    monkeypatch.setattr("quantkit.doctor.examine", function)
    assert main(["doctor"]) == 3
    assert "out of memory" in capsys.readouterr().err


def test_other_errors_are_not_a_lack_of_memory():
    assert out_of_memory(ValueError("memory")) is None
    outer = RuntimeError("x")
    outer.__cause__ = MemoryError()
    assert out_of_memory(outer) is not None


STARVED = """
import resource
import sys
from pathlib import Path

from quantkit import doctor
from quantkit.cli.main import main


def starve():
    kept = []
    for size in (1 << 16, 64):
        try:
            while True:
                kept.append(bytearray(size))
        except MemoryError:
            pass
    raise SystemError("error return without exception set")


doctor.examine = starve
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20),) * 2)
sys.exit(main(["doctor"]))
"""


def test_whatever_fails_without_memory_left_is_a_lack_of_memory():
    """Python loses errors there, and does not even have the memory to print one."""
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("quantkit: out of memory: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def dead():
    """The number of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_halves_of_killed_writers_go_when_the_file_is_written_again(tmp_path, dead):
    (tmp_path / f".report.json.{dead}").write_text("{")
    (tmp_path / f".report.json.{os.getppid()}").write_text("{")
    (tmp_path / f".other.json.{dead}").write_text("{")
    storage.write_json(tmp_path / "report.json", {})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"report.json", f".report.json.{os.getppid()}", f".other.json.{dead}"}


def test_halves_in_an_output_folder_go_whatever_is_written_next(tmp_path, dead):
    for name in (f".a.json.{dead}", ".b.answers.parquet.partial", ".bashrc", ".x.7"):
        (tmp_path / name).write_text("")
    with storage.output_folder(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".bashrc", ".x.7"}


def test_locks_and_scratch_of_killed_runs_go_with_the_next_run_beside_them(tmp_path):
    (tmp_path / ".killed.lock").touch()
    (tmp_path / ".killed.scratch").mkdir()
    (tmp_path / ".resumable.lock").touch()
    (tmp_path / ".resumable.partial").mkdir()
    (tmp_path / ".theirs.lock").write_text("not ours")
    with (
        lock.sole_writer(tmp_path / ".alive.lock", tmp_path / "alive"),
        storage.scratch_folder(tmp_path / "new") as scratch,
    ):
        (tmp_path / ".alive.scratch").mkdir()
        (scratch / storage.MANIFEST).write_text("{}")
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {
            ".alive.lock",
            ".alive.scratch",
            ".new.lock",
            ".new.scratch",
            ".resumable.partial",
            ".theirs.lock",
        }
    assert not (tmp_path / ".new.lock").exists()
