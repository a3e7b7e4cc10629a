"""A run that is stopped keeps what is finished and leaves nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantkit.onepass import onepass


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


def test_a_stopped_command_says_how_to_go_on(tmp_path, run_cli, monkeypatch):
    out, text = tmp_path / "out", str(Path(__file__).parents[2] / "CHANGELOG.md")
    few = ["--calibration", text, "--samples", "4", "--length", "64"]

    def stopped(visit, *rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(onepass.Visit, "observe", stopped)
    result = run_cli(["quantize", "demo", "-r", "gptq-w4a16", *few, "-o", out])
    assert result.code == 130
    assert "calibration: 4 samples" in result.stderr
    assert "interrupted: finished work is kept; run the same command again" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (out / "gptq-w4a16").exists()
