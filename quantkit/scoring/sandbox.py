"""A sandbox for programs that a model wrote: a restricted process with limits and an empty folder.

`sandbox_child.py` describes the restrictions. Where the system cannot provide them, nothing is run.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from pathlib import Path
from typing import Any

from quantkit.errors import ScoreError

SECONDS = 10.0
"""Wall-clock seconds; CPU time is limited by `LIMITS["CPU"]`."""
LIMITS = {
    "CPU": 5,
    "AS": 2 << 30,
    "DATA": 1 << 30,
    "FSIZE": 16 << 20,
    "NOFILE": 64,
    "CORE": 0,
    "STACK": 64 << 20,
}
FOLDER_BYTES = 64 << 20
LOOKS_S = 0.02
PROBE = """
import os, socket
def refused(call):
    try:
        call()
    except OSError:
        return
    raise SystemExit("a wall has a hole")
refused(socket.socket)
refused(os.fork)
refused(lambda: open("/etc/passwd"))
refused(lambda: open("../quantkit-hole", "w"))
with open("own", "w") as file:
    file.write("x")
"""


@dataclass(frozen=True)
class Verdict:
    """How a program ended."""

    passed: bool
    why: str = ""


def run(program: str, seconds: float = SECONDS) -> Verdict:
    """Run a program in the sandbox; it passes when it runs to its end."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="quantkit-box-", ignore_cleanup_errors=True) as folder:
        job = {"program": program, "folder": folder, "limits": LIMITS, "token": token}
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-B",
                    str(Path(__file__).with_name("sandbox_child.py")),
                    str(writing),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8"},
                pass_fds=(writing,),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as report:
            why = _watched(process, json.dumps(job).encode(), Path(folder), seconds)
            outcome = report.read(1000).decode(errors="replace")
    if outcome == f"passed {token}" and not why:
        return Verdict(True)
    if outcome.startswith("walls "):
        reason = outcome.removeprefix("walls ")
        raise ScoreError(
            f"code that a model wrote cannot be run on this machine: {reason}; leave out such "
            "tasks, or score on Linux 5.13 or newer"
        )
    return Verdict(
        False, why or outcome.removeprefix("failed ") or "it ended itself, or was killed"
    )


def _watched(process: Any, job: bytes, folder: Path, seconds: float) -> str:
    """Wait until it ends or is killed; returns why in the second case."""
    deadline = time.monotonic() + seconds
    try:
        process.stdin.write(job)
        process.stdin.close()
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"it took longer than {seconds:g} s"
            if _size(folder) > FOLDER_BYTES:
                return f"it wrote more than {FOLDER_BYTES >> 20} MiB"
            time.sleep(LOOKS_S)
        return ""
    except BrokenPipeError:
        return "it did not start"
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).lstat().st_size
            except OSError:  # gone meanwhile
                continue
    return total


@cache
def check() -> None:
    """Refuse where the sandbox is not effective."""
    if sys.platform != "linux":
        raise ScoreError(
            "code that a model wrote runs in a sandbox, which needs Linux; leave out tasks "
            "such as humaneval and mbpp here"
        )
    found = run(PROBE)
    if not found.passed:
        raise ScoreError(
            f"the sandbox for code that a model wrote does not hold on this machine ({found.why}); "
            "leave out tasks such as humaneval and mbpp here"
        )


REFUSAL = (
    "{task} runs code that the model wrote; allow it with --allow-code, which runs it in a sandbox "
    "without network and files, or choose another task"
)


class CodeEval:
    """The metric `code_eval` as lm-eval's tasks load it, run in the sandbox."""

    def __init__(self) -> None:
        self.is_allowed = False
        self.is_loading = False
        """Tasks try the metric when they are loaded, with a program of their own."""

    def compute(
        self,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1, 10, 100),
        **more: Any,
    ) -> tuple[dict[str, float], dict[int, list[Verdict]]]:
        """The share of programs that pass their tests, as `pass@k`, and each verdict."""
        if self.is_loading:
            return {f"pass@{number}": 0.0 for number in k}, {}
        if not self.is_allowed:
            raise ScoreError(REFUSAL.format(task="a task"))
        found = {
            place: [run(f"{program}\n{test}") for program in programs]
            for place, (test, programs) in enumerate(zip(references, predictions, strict=True))
        }
        rates = {}
        for number in k:
            if all(len(verdicts) >= number for verdicts in found.values()):
                each = [pass_at(number, verdicts) for verdicts in found.values()]
                rates[f"pass@{number}"] = sum(each) / len(each)
        return rates, found


def pass_at(k: int, verdicts: Sequence[Verdict]) -> float:
    """The probability that one of k programs passes, drawn from those that were written."""
    n, right = len(verdicts), sum(verdict.passed for verdict in verdicts)
    return 1 - comb(n - right, k) / comb(n, k)


CODE_EVAL = CodeEval()
"""One per process: modules of tasks that are loaded once keep a reference to it."""
