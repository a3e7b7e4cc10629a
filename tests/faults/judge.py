"""What became of a damaged input: refused by one of our errors, accepted and the same, or a defect.

Every case runs in a forked child, so that one that hangs, takes all memory or dies is one case.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

HANG_S = 10.0
KILL_S = 60.0
"""A machine that others share may make a case slow; what takes longer than this is killed."""
SIGNATURE = "quantkit: "

REFUSED, EQUIVALENT, DEFECT = "refused", "accepted, equivalent", "defect"


@dataclass(frozen=True)
class Outcome:
    """One case."""

    verdict: str
    why: str
    cpu_s: float
    peak_bytes: int


def tried(command: Callable[[], int], is_same: Callable[[], str], log: Path) -> Outcome:
    """Run a command on damaged input, and judge it.

    `is_same` is asked only when the command accepted it: what is different, or nothing.
    """
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(command, is_same, log, writer)
    os.close(writer)
    timer_fired = False

    def stop(*_: object) -> None:
        nonlocal timer_fired
        timer_fired = True
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, KILL_S)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status, usage = os.wait4(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10
    if timer_fired:
        return Outcome(DEFECT, f"hangs ({time.monotonic() - started:.0f} s)", cpu, peak)
    if os.WIFSIGNALED(status):
        return Outcome(DEFECT, f"killed by signal {os.WTERMSIG(status)}", cpu, peak)
    if not told:
        return Outcome(DEFECT, f"ended without a word, status {status}", cpu, peak)
    found = json.loads(told)
    if cpu > HANG_S:
        return Outcome(DEFECT, f"took {cpu:.0f} s of a processor", cpu, peak)
    return Outcome(found["verdict"], found["why"], cpu, peak)


def _in_child(
    command: Callable[[], int], is_same: Callable[[], str], log: Path, writer: int
) -> None:
    """Never returns."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
        try:
            rc = command()
            sys.stdout.flush()
            verdict, why = _verdict(rc, is_same, log)
        except BaseException as error:
            verdict, why = DEFECT, f"{type(error).__name__}: {error}"
            traceback.print_exc()
        sys.stdout.flush()
        os.write(writer, json.dumps({"verdict": verdict, "why": why[:500]}).encode())
        code = 0
    finally:
        os._exit(code)


def _verdict(rc: int, is_same: Callable[[], str], log: Path) -> tuple[str, str]:
    said = log.read_text(errors="replace")
    if rc == 70 or "Traceback (most recent call last)" in said:
        return DEFECT, f"exit code {rc}: {said.strip().splitlines()[-2:]}"
    line = next((x for x in said.splitlines() if x.startswith(SIGNATURE)), None)
    if rc in (2, 3) or (rc == 1 and line is not None):  # 1: `verify` names a fault
        if line is None:
            return DEFECT, f"exit code {rc} without a message"
        return REFUSED, line.removeprefix(SIGNATURE)
    if rc not in (0, 1):
        return DEFECT, f"exit code {rc}"
    if difference := is_same():
        return DEFECT, f"accepted, and {difference}"
    return EQUIVALENT, ""


def as_json(outcome: Outcome) -> dict[str, object]:
    return asdict(outcome)
