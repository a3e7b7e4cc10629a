"""A run that is stopped keeps what is finished and leaves nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "quantkit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def wait_for(path, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_stopped_run_keeps_what_is_finished(tmp_path, number, code):
    out = tmp_path / "out"
    arguments = ["run", "demo", "-r", "rtn-w8a16", "--tasks", "python_docs", "-o", str(out)]
    process = start(*arguments)
    wait_for(out / "rtn-w8a16", process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr
    if number == signal.SIGINT:
        assert "interrupted: kept in" in stderr
        assert "rtn-w8a16" in stderr
        assert "run the same command again" in stderr
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    assert (out / "rtn-w8a16" / "quantkit.json").is_file()


def test_a_stopped_command_says_how_to_go_on(tmp_path):
    out, text = tmp_path / "out", str(Path(__file__).parents[2] / "CHANGELOG.md")
    few = ["--calibration", text, "--samples", "16", "--length", "128"]
    process = start("quantize", "demo", "-r", "gptq-w4a16", *few, "-o", str(out))
    while not (line := process.stderr.readline()).startswith("calibration:"):
        assert line, "it ended before the work began"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: finished work is kept; run the same command again" in stderr
    assert "Traceback" not in stderr
    assert not (out / "gptq-w4a16").exists()
