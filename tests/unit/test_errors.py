import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit import errors
from quantkit.errors import QuantkitError, UnknownName


def test_near_match_is_offered_alone():
    message = str(UnknownName("recipe", "rtn-w4a61", ["rtn-w4a16", "fp8-dynamic"]))
    assert message == "unknown recipe 'rtn-w4a61'. Did you mean rtn-w4a16?"


def test_at_most_three_near_matches():
    message = str(UnknownName("task", "aab", ["aaa", "aac", "aad", "aae", "aaf"]))
    assert message.count(",") == 1
    assert message.count(" or ") == 1


@pytest.mark.parametrize(
    ("name", "first"),
    [("fp8", "fp8-block"), ("Q5_K_S", "gguf-q5_k_s"), ("FP8_Dynamic", "fp8-dynamic")],
)
def test_case_punctuation_and_what_is_left_out_do_not_matter(name, first):
    known = ["awq-w4a16", "fp8-block", "fp8-dynamic", "gguf-q4_k_s", "gguf-q5_k_s", "mxfp8"]
    assert errors.near_matches(name, known)[0] == first


def test_all_names_when_none_is_near():
    message = str(UnknownName("device", "tpu", iter(["cuda", "cpx", "auto"])))
    assert message == "unknown device 'tpu'. Choose from: auto, cpx, cuda."


def test_nothing_known():
    assert str(UnknownName("set", "x", [])) == "unknown set 'x'."


def test_hint_stands_last():
    message = str(UnknownName("recipe", "x", ["fp8"], "A path works too."))
    assert message == "unknown recipe 'x'. Choose from: fp8. A path works too."


ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception) and value is not QuantkitError
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_stands_in_the_tree(kind):
    assert issubclass(kind, QuantkitError)
    assert f"\n      {kind.__name__} " in errors.__doc__


def test_exit_codes_differ():
    named = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    told = named.pop("EXIT_CODES")
    assert sorted(named.values()) == sorted(told) == [0, 1, 2, 3, 70, 130, 141, 143]


def test_an_interrupt_that_python_noted_while_compiling_exits_with_130(tmp_path):
    """CPython 3.11: one that leaves `exec` makes `python -m` exit by a signal, even if caught."""
    (tmp_path / "stopped.py").write_text(
        "from quantkit.cli import main\n"
        "def interrupted():\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        return 130\n"
        "main.main = interrupted\n"
        "main.entry()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "stopped"]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode == 130
