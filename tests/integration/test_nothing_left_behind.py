"""Whatever ends a command that starts engines, no process of theirs is left.

Processes are told by a mark in their environment, which every descendant inherits, so none can
escape by leaving its group or losing its parent.
"""

import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from processes import free_port

from quantkit.engine import process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FAKE = Path(__file__).parents[1] / "fake_vllm"
ROOT = Path(__file__).parents[2]
MARK = "QUANTKIT_TEST_FAMILY"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    from quantkit.cli.main import main

    out = tmp_path_factory.mktemp("made")
    handler = signal.getsignal(signal.SIGTERM)
    recipes = ["-r", "rtn-w4a16", "-r", "fp8-dynamic"]
    assert main(["quantize", "demo", *recipes, "-o", str(out), "-q"]) == 0
    signal.signal(signal.SIGTERM, handler)
    return out


@pytest.fixture
def mark(monkeypatch):
    """In the environment of whatever is started from now on."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return f"{MARK}={value}".encode()


@pytest.fixture
def worker_python(tmp_path):
    """A Python with the stand-in of vLLM, for what is driven without a server."""
    path = tmp_path / "python"
    text = f'PYTHONPATH="{FAKE}:{ROOT}" OMP_NUM_THREADS=1 exec "{sys.executable}" "$@"'
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def family(mark):
    """Processes with the mark that are not dead yet."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
        except (OSError, ValueError):  # gone meanwhile, dead, or somebody else's
            continue
    return found


def none_left(mark):
    deadline = time.monotonic() + 10
    while left := family(mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def start(arguments):
    """A command in a process of its own, as a shell starts it."""
    line = [sys.executable, "-m", "quantkit", *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def stopped(command, number, ready):
    """Its exit code after a signal that is sent once the engines are there."""
    deadline = time.monotonic() + 60
    while not ready():
        assert command.poll() is None, command.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.send_signal(number)
    command.communicate(timeout=40)
    return command.returncode


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_bench_that_is_stopped_while_a_server_starts(made, mark, tmp_path, number, code):
    fake = FakeEngine(tmp_path / "engine", "hangs")
    running = start(["bench", made / "fp8-dynamic", "--python", fake.python])
    assert stopped(running, number, lambda: fake.was_started) == code
    assert none_left(mark) == []


def test_bench_without_a_server_that_is_stopped(made, mark, worker_python, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "hang")
    running = start(["bench", made / "fp8-dynamic", "--offline", "--python", worker_python])
    # Itself, the engine and the engine's worker.
    assert stopped(running, signal.SIGTERM, lambda: len(family(mark)) == 3) == 143
    assert none_left(mark) == []


@pytest.mark.parametrize(
    ("number", "code", "jobs"),
    [pytest.param(signal.SIGINT, 130, 1, marks=pytest.mark.slow), (signal.SIGTERM, 143, 2)],
)
def test_verify_that_is_stopped_while_engines_run(
    made, mark, worker_python, monkeypatch, number, code, jobs
):
    monkeypatch.setenv("FAKE_VLLM", "hang")
    folders = [made / "fp8-dynamic", made / "rtn-w4a16"][:jobs]
    command = ["verify", *folders, "--backend", "vllm", "--python", worker_python]
    running = start([*command, "--level", "generate", "--jobs", jobs])
    assert stopped(running, number, lambda: len(family(mark)) == 1 + 2 * jobs) == code
    assert none_left(mark) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_serve_that_is_stopped_while_the_engine_loads(made, mark, tmp_path, number, code):
    fake = FakeEngine(tmp_path / "engine", "hangs")
    command = ["serve", made / "fp8-dynamic", "--gpu", "H200", "--no-check", "--port", free_port()]
    running = start([*command, "--python", fake.python])
    assert stopped(running, number, lambda: fake.was_started) == code
    assert none_left(mark) == []


@pytest.mark.slow
def test_draft_starts_nothing_that_could_stay(made, mark, tmp_path):
    """Slow: it has no engine, and takes what a whole command takes."""
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 40)
    short = ["--samples", "1", "--prompt", "8", "--tokens", "9", "--device", "cpu"]
    running = start(["draft", "demo", made / "rtn-w4a16", "--calibration", text, *short])
    seen = {running.pid}
    while running.poll() is None:
        seen |= set(family(mark))
        time.sleep(0.05)
    assert running.returncode == 0, running.stderr.read()
    running.stderr.close()
    assert seen == {running.pid}
    assert none_left(mark) == []


@pytest.mark.parametrize("how", ["serves", "dies", "fails", "deaf"])
def test_serve_and_bench_that_end_by_themselves(run_cli, made, mark, tmp_path, monkeypatch, how):
    monkeypatch.setattr(process, "PATIENCE", 0.3)
    fake = FakeEngine(tmp_path / "engine", how)
    quick = ["--prompt", "8", "--output", "2", "--requests", "1", "--timeout", "2", "-q"]
    run_cli(["bench", made / "fp8-dynamic", "--python", fake.python, *quick])
    assert fake.was_started
    assert none_left(mark) == []
    command = ["serve", made / "fp8-dynamic", "--gpu", "H200", "--no-check", "--once", "-q"]
    run_cli([*command, "--port", free_port(), "--python", fake.python])
    assert none_left(mark) == []


def test_engines_that_hang_are_ended_with_their_workers(
    run_cli, made, mark, tmp_path, worker_python, monkeypatch
):
    fake = FakeEngine(tmp_path / "engine", "hangs")
    command = ["bench", made / "fp8-dynamic", "--python", fake.python, "--start-timeout", "2"]
    assert "not ready within 2 s" in run_cli([*command, "-q"]).stderr
    assert fake.was_started
    assert none_left(mark) == []
    monkeypatch.setenv("FAKE_VLLM", "hang")
    command = ["verify", made / "fp8-dynamic", "--backend", "vllm", "--python", worker_python]
    result = run_cli([*command, "--level", "generate", "--timeout", "3", "-q"])
    assert "did not end within 3 s" in result.stderr
    assert none_left(mark) == []
