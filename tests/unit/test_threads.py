"""Threads follow a container's quota, wait asleep, and leave what the user set."""

import os
import subprocess
import sys

import pytest

from quantkit import threads


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", None),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("800000 100000", 8),
        ("", None),
    ],
)
def test_a_quota_is_worth_whole_cores(tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert threads.quota(tmp_path) == expected


@pytest.mark.parametrize(("amount", "expected"), [("-1", None), ("250000", 3)])
def test_so_is_one_of_the_first_version(tmp_path, amount, expected):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(amount)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert threads.quota(tmp_path) == expected


def test_where_nothing_tells_there_is_none(tmp_path):
    assert threads.quota(tmp_path) is None


SEEN = """
import ctypes, os, subprocess, sys
from quantkit import threads
threads.quota, threads.cores = lambda: 1, lambda: 4
threads.settle()
c = ctypes.CDLL(None).getenv
c.restype = ctypes.c_char_p
print([(c(name) or b"").decode() for name in (b"OMP_WAIT_POLICY", b"OMP_NUM_THREADS")])
child = "import os; print([os.environ.get(n) for n in ('OMP_WAIT_POLICY', 'OMP_NUM_THREADS')])"
subprocess.run([sys.executable, "-c", child], env=dict(os.environ))
"""


@pytest.mark.parametrize(
    ("given", "own", "childs"),
    [
        ({}, "['PASSIVE', '1']", "[None, None]"),
        ({"OMP_NUM_THREADS": "3"}, "['PASSIVE', '3']", "[None, '3']"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "['ACTIVE', '1']", "['ACTIVE', None]"),
    ],
)
def test_libraries_are_told_and_programs_that_we_start_are_not(given, own, childs):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")} | given
    done = subprocess.run(
        [sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert {first, second} == {own, childs}
