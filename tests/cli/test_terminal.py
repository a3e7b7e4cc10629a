"""On a real terminal, where bars are drawn: results are still there when they are gone."""

import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from quantkit.cli import console


def on_terminal(command, columns=80):
    """The exit code, and all that a terminal was sent."""
    leader, follower = pty.openpty()
    program = [sys.executable, "-m", "quantkit", *map(str, command)]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "HF_HUB_OFFLINE": "1"}
    child = subprocess.Popen(
        program, stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    return child.wait(), shown.decode(errors="replace")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
def test_scores_are_shown_after_bars_that_began_in_a_silenced_library(tmp_path):
    command = ["score", "demo", "--tasks", "python_docs", "--limit", 2, "--max-length", 100]
    code, shown = on_terminal([*command, "-o", tmp_path / "scores"])
    assert code == 0, shown
    assert "━" in shown  # there was a bar
    assert "python_docs/perplexity" in shown.rpartition("━")[2]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
@pytest.mark.parametrize("columns", [40, 60])
def test_an_error_fits_the_terminal_and_hangs_in(columns):
    code, shown = on_terminal(["recipes", "show", "nope"], columns)
    first, *more = shown.strip().replace("\r", "").split("\n")
    assert code == 3
    assert first.startswith("quantkit: unknown recipe 'nope'.")
    assert more
    assert all(line.startswith("  ") for line in more)
    assert max(map(len, [first, *more])) <= columns


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
@pytest.mark.parametrize("columns", [64, 80])
def test_sentences_fit_the_terminal_and_options_stay_whole(run_cli, columns):
    command = ["recommend", "70B", "--gpu", "L4", "--count", "2", "--host-memory", "64GB"]
    code, shown = on_terminal(command, columns)
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).replace("\r", "").split("\n")
    assert code == 0
    assert [line for line in lines if len(line) > columns and "quantkit quantize" not in line] == []
    unwrapped, option = run_cli(command).stdout, re.compile(r"(?<!\S)\(?--[a-z-]+\S*")
    options = option.findall(unwrapped)
    assert len(options) > 10
    assert sorted(option.findall("\n".join(lines))) == sorted(options)


@pytest.mark.parametrize("name", ["awq-gptq-w4a16", "gptq-w4a16", "a-name-of-18-letters"])
@pytest.mark.parametrize("metric", ["perplexity", "python_docs/perplexity", "acc_norm (earlier)"])
def test_a_table_is_no_wider_than_the_terminal(monkeypatch, name, metric):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    limits = [("-1.31 points", "at most 2 points lower", "cannot tell"), ("+9%", "as scored", "no")]
    headings = ["candidate", "metric", "value", "limit", "answer"]
    text = console.table_text(headings, [[name, metric, *one] for one in limits], (0, 1, 3, 4))
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).split("\n")
    assert max(map(len, lines)) <= 80
    assert all(word in text for word in (name, metric.split()[0], "-1.31 points"))


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0"), (0.5, "0.5"), (405, "405"), (99_999, "99,999"), (5_770_496, "5.8M"), (8e9, "8.0G")],
)
def test_progress_bars_have_short_numbers(amount, shown):
    """A bar of weights at 80 columns took two lines."""
    assert console.compact(amount) == shown


def test_numbers_and_names_stay_whole_in_a_table_that_cannot_fit(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    text = console.table_text(["model", "size"], [["a-name-of-18-letters", "1,234.5 GiB"]])
    assert "a-name-of-18-letters" in text
    assert "1,234.5 GiB" in text


def test_scores_are_few_unless_all_are_asked_for(run_cli):
    command = ["score", "demo", "--tasks", "python_docs", "--limit", 2, "--max-length", 100, "-q"]
    short, long = run_cli(command).stdout, run_cli([*command, "-v"]).stdout
    assert "python_docs/perplexity" in short
    assert "kl_" not in short, "of the source itself"
    assert "more with -v" in short
    assert "python_docs/byte_perplexity" in long
    assert "python_docs/kl_p99" in long
    assert "more with -v" not in long


@pytest.mark.parametrize(("is_terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_a_terminal_is_told_at_once_that_libraries_are_loaded(monkeypatch, is_terminal, quiet):
    screen = io.StringIO()
    screen.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", screen)
    with console.loading(quiet):
        shown = screen.getvalue()
    assert bool(shown) == (is_terminal and not quiet)
    assert screen.getvalue() in ("", f"{shown}\r\x1b[2K")


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
@pytest.mark.parametrize("more", [[], ["--objective", "throughput", "--users", "40"]])
def test_all_gpus_fit_on_a_screen_or_two_and_each_has_its_choice(run_cli, more):
    command = ["recommend", "8B", "--gpu", "all", *more]
    code, shown = on_terminal(command)
    assert code == 0
    assert shown.count("\n") < 60
    told = re.sub(r"\s+", " ", shown)
    answers = json.loads(run_cli([*command, "--json"]).stdout)["answers"]
    for answer in answers:
        assert (f" {answer['gpu']}: " in told) == (answer["format"] is not None)
        assert answer["gpu"] in told
        assert answer["format"] is None or f" {answer['format']} " in told
