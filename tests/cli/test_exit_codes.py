"""Exit codes: one meaning each, in the code, in the help and in the docs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit import errors

ROOT = Path(__file__).parents[2]


def test_the_docs_have_a_row_for_every_code():
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", (ROOT / "docs/ci.md").read_text(), re.M)
    told = {int(code): text for codes, text in rows for code in codes.split(",")}
    assert set(told) == set(errors.EXIT_CODES)
    for code, words in errors.EXIT_CODES.items():
        assert words in told[code]
    readme = " ".join((ROOT / "README.md").read_text().split())
    for code, words in errors.EXIT_CODES.items():
        assert f"{code} {words}" in readme


def test_the_help_tells_them_in_short(run_cli):
    told = " ".join(run_cli(["--help"]).stdout.split())
    for code, words in errors.EXIT_CODES.items():
        assert f"{code} {words}" in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrate", "build", "--model", "demo", "-o", "x"],
        ["calibrate", "build", "general", "--from", "a", "--model", "demo", "-o", "x"],
        ["calibrate", "build", "general", "--model", "demo", "-o", "x", "--short", "pakc"],
        ["bench", "demo", "--prompt", "many"],
        ["bench", "demo", "--ttft", "soon"],
        ["bench", "demo", "--sweep", "max_num_seq=1"],
        ["bench", "demo", "--sweep", "max_num_seqs=x"],
        ["bench", "demo", "--arrivals", "never"],
        ["quantize", "demo", "-r", "rtn-w4a16", "--offload", "maybe"],
        ["quantize", "demo", "-r", "rtn-w4a16", "--engine", "natve"],
        ["score", "demo", "--backend", "onnx"],
        ["verify", "nowhere", "--level", "deep"],
        ["recommend", "8B", "--memory", "24", "--bandwidth", "1TB/s"],
        ["recommend", "8B", "--memory", "24GB", "--bandwidth", "1TB/s", "--tflops", "0"],
    ],
    ids=" ".join,
)
def test_values_that_an_option_does_not_take_are_wrong_usage(run_cli, arguments):
    result = run_cli(arguments)
    assert (result.code, result.stdout) == (errors.EXIT_USAGE, "")
    assert result.stderr.count("quantkit: ") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "demo", "-r", "nope"],
        ["gpus", "nope"],
        ["recommend", "~nobody-of-that-name/model", "--gpu", "H100"],
        ["quantize", "~nobody-of-that-name/model", "-r", "rtn-w4a16"],
        ["gate", "/no/report.json"],
        ["calibrate", "inspect", "/no/set"],
        ["sweep", "run", "/no/sweep.yaml"],
        ["verify", "/no/checkpoint"],
    ],
    ids=" ".join,
)
def test_what_is_not_there_could_not_be_done(run_cli, arguments):
    result = run_cli(arguments)
    assert (result.code, result.stdout) == (errors.EXIT_ERROR, "")


def test_options_offer_what_there_is():
    import typer

    from quantkit.advise.profiles import PROFILES
    from quantkit.advise.question import OBJECTIVES
    from quantkit.bench.arguments import ARRIVALS
    from quantkit.cli.main import app
    from quantkit.engine.vllm_job import LEVELS
    from quantkit.onepass.estimate import OFFLOAD
    from quantkit.scoring.harness import BACKENDS
    from quantkit.serving.emit import KINDS
    from quantkit.sweep.start import EXECUTORS

    commands = typer.main.get_command(app).commands
    commands = commands | {f"sweep {k}": c for k, c in commands["sweep"].commands.items()}
    for command, option, names in (
        ("recommend", "objective", OBJECTIVES),
        ("recommend", "profile", PROFILES),
        ("serve", "profile", PROFILES),
        ("serve", "emit", KINDS),
        ("bench", "arrivals", ARRIVALS),
        ("verify", "level", LEVELS),
        ("quantize", "offload", OFFLOAD),
        ("score", "backend", BACKENDS),
        ("sweep run", "on", EXECUTORS),
    ):
        found = next(p for p in commands[command].params if p.name == option)
        with pytest.raises(Exception, match=" is not ") as refused:
            found.callback(None, found, "no such value")
        offered = re.split(", | or ", str(refused.value).partition(" is not ")[2].rstrip("."))
        assert set(offered) == set(names), (command, option)


def test_a_log_has_lines_on_stages_and_json_alone_on_stdout(tmp_path, run_cli):
    command = ["quantize", "demo", "-r", "rtn-w4a16", "--json"]
    done = run_cli([*command, "-o", tmp_path / "a"])
    assert done.code == 0, done.stderr
    assert [one["manifest"]["name"] for one in json.loads(done.stdout)] == ["rtn-w4a16"]
    assert re.search(r"^quantize: [\d.]+ MiB in [\d.]+ s$", done.stderr, re.M)
    assert "━" not in done.stderr
    quiet = run_cli([*command, "-q", "-o", tmp_path / "b"])
    assert (quiet.code, quiet.stderr) == (0, "")


def quantkit(*arguments, **streams):
    command = [sys.executable, "-m", "quantkit", *arguments]
    return subprocess.run(command, check=False, text=True, **streams)


@pytest.fixture
def unread():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def test_a_reader_that_went_away_is_neither_yes_nor_no(unread):
    done = quantkit("gpus", stdout=unread, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (errors.EXIT_UNREAD, "")


@pytest.mark.parametrize(
    "command",
    [
        "recommend 8B --gpu H100 --html",
        pytest.param("quantize demo -r rtn-w4a16 -o", marks=pytest.mark.slow),
    ],
)
def test_a_note_that_nobody_reads_is_no_answer_either(unread, tmp_path, command):
    """Slow: notes of progress, which come from rich, in a command that loads torch."""
    done = quantkit(*command.split(), tmp_path / "out", stdout=subprocess.PIPE, stderr=unread)
    assert done.returncode == errors.EXIT_UNREAD


def test_an_error_keeps_its_code_where_nobody_can_be_told(unread):
    done = quantkit("gpus", "nope", stdout=subprocess.PIPE, stderr=unread)
    assert (done.returncode, done.stdout) == (errors.EXIT_ERROR, "")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell closes them")
@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        ("recipes", ">&-", errors.EXIT_OK),
        ("recipes", "2>&-", errors.EXIT_OK),
        ("gpus nope", "2>&-", errors.EXIT_ERROR),
        ("gpus nope", "<&- >&- 2>&-", errors.EXIT_ERROR),
    ],
)
def test_streams_may_be_closed(arguments, closed, code):
    command = f"exec '{sys.executable}' -m quantkit {arguments} {closed}"
    done = subprocess.run(["sh", "-c", command], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert bool(done.stdout) == (arguments == "recipes" and closed != ">&-")
