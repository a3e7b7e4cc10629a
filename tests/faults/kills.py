"""Kills and limits: every command that writes, ended or starved at random, then called again.

Each seed forks a child that runs one command, kills it (signal 9) at a random moment of what it
usually takes, and calls it again until it is done. What lies there afterwards must be what an
undisturbed run leaves, byte for byte apart from dates and durations, and nothing else. Limits are
few descriptors, files that may not grow (as on a full disk) and little memory: the command must say
so in one sentence, and the next call must go on.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults.world import build, linked

from quantkit.cli.main import main

VOLATILE = {
    *("created", "seconds", "stage_seconds", "peak_host_bytes", "peak_device_bytes", "date"),
    *("manifest_sha256", "host", "seal", "folder", "sha256", "size_bytes", "cached", "digest"),
    *("attempt", "started", "finished", "version", "pid", "until", "since", "spent"),
}
"""Of JSON: when and where, and hashes of files that say so."""
DATE = re.compile(rb"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?)?|\d+(\.\d+)? (s|min|h|ms)\b")
FIGURES = re.compile(rb"<svg.*?</svg>|[\d.,]+(e[+-]\d+)?", re.DOTALL)
"""Of pages, which show what lies beside them as JSON, and how long that took, by numbers of any
kind."""
ATTEMPT = re.compile(r"(results/[^/]+/)[0-9a-f]{12}")
"""A folder of a sweep that is called otherwise each time."""
TRIES = 4
HANGS_S = 60
"""Of the processor, where a command takes ten."""

Arguments = Callable[[Path, Path], list[str]]


def _quantize(*recipes: str, calibrated: bool = False) -> Arguments:
    def made(world: Path, out: Path) -> list[str]:
        asked = [option for recipe in recipes for option in ("-r", recipe)]
        learn = ["--calibration", str(world / "text.txt"), "--samples", "4", "--length", "64"]
        where = ["-o", str(out / "made"), "--device", "cpu", "-q"]
        return ["quantize", str(world / "model"), *asked, *(learn if calibrated else []), *where]

    return made


COMMANDS: dict[str, Arguments] = {
    "quantize": _quantize("rtn-w4a16", "fp8-dynamic"),
    "quantize, calibrated": _quantize("gptq-w4a16", "int8-w8a8", calibrated=True),
    "quantize, GGUF": _quantize("gguf-q4_0"),
    "convert": lambda world, out: [
        *("convert", str(world / "made" / "rtn-w4a16"), "--to", "awq", "-o", str(out / "new"), "-q")
    ],
    "calibrate": lambda world, out: [
        *("calibrate", "build", str(world / "text.txt"), "--model", str(world / "model"), "-q"),
        *("--samples", "4", "--length", "32", "-o", str(out / "set")),
    ],
    "score": lambda world, out: [
        *("score", str(world / "made" / "rtn-w4a16"), "--tasks", "python_docs", "--limit", "2"),
        *("-o", str(out / "scores"), "--cache", str(out / "cache"), "--device", "cpu", "-q"),
    ],
    "report": lambda world, out: ["report", str(world / "scores"), "-o", str(out / "report")],
    "gate": lambda world, out: [
        *("gate", str(world / "report" / "report.json"), "--markdown", str(out / "gate.md")),
        *("--junit", str(out / "gate.xml")),
    ],
    "card": lambda world, out: ["card", str(out / "made" / "rtn-w4a16")],
    "sweep": lambda world, out: [
        *("sweep", "run", str(world / "kill-sweep.yaml"), "-o", str(out / "runs"), "-q"),
    ],
}
SWEEP = """\
models: [{model: MODEL, name: small}]
recipes: [rtn-w4a16]
tasks: [python_docs]
limit: 1
device: cpu
"""
CLEAN_CODES = (0, 1, 3)


class Field:
    """Undisturbed results of all commands, and a room to disturb them in."""

    def __init__(self, room: Path, world: Path | None = None) -> None:
        torch.set_num_threads(1)
        self.room = room
        self.world = build(world or room / "world").folder
        text = SWEEP.replace("MODEL", str(self.world / "model"))
        (self.world / "kill-sweep.yaml").write_text(text)
        self._known: dict[str, tuple[float, dict[str, Any]]] = {}

    def one(self, seed: int) -> tuple[str, bool, str]:
        """A command, whether it was killed before it ended, and what is wrong if anything is."""
        chance = random.Random(f"kills {seed}")
        name = list(COMMANDS)[seed % len(COMMANDS)]
        duration, expected = self._undisturbed(name)
        out = self._fresh(name, "out")
        arguments = COMMANDS[name](self.world, out)
        child = _forked(arguments, self.room / "log")
        time.sleep(chance.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        was_killed = os.WIFSIGNALED(status)
        return name, was_killed, self._again(name, arguments, out, expected)

    def limited(self, seed: int) -> tuple[str, str, str]:
        """A limit, how the command ended under it, and what is wrong if anything is."""
        chance = random.Random(f"limits {seed}")
        name = list(COMMANDS)[seed // len(LIMITS) % len(COMMANDS)]
        limit = list(LIMITS)[seed % len(LIMITS)]
        _, expected = self._undisturbed(name)
        out = self._fresh(name, "out")
        arguments = COMMANDS[name](self.world, out)
        code = _waited(_forked(arguments, self.room / "log", LIMITS[limit], chance.random()))
        said = (self.room / "log").read_text(errors="replace")
        if code == -signal.SIGXCPU:
            return limit, "", f"{name} hangs: {said[-300:]}"
        if code < 0 or (code == 1 and name != "gate"):
            # Libraries in C end the process where they get no memory; nothing can be said then.
            if limit != "little memory":
                return limit, "", f"{name} ends with {code}: {said[-300:]}"
            ended = "ended by a library"
        elif code == 0 or (name == "gate" and code == 1):
            ended = "done all the same"
        elif code == 3 and "quantkit: " in said:
            ended = "refused"
        else:
            return limit, "", f"{name} ends with {code}: {said[-600:]}"
        return limit, ended, self._again(name, arguments, out, expected)

    def _again(self, name: str, arguments: list[str], out: Path, expected: dict[str, Any]) -> str:
        """Call a command until it is done; what is wrong then, if anything is."""
        code = None
        for _ in range(TRIES):
            code = _waited(_forked(arguments, self.room / "log"))
            if code == 0 or code not in CLEAN_CODES:
                break
            said = (self.room / "log").read_text(errors="replace")
            if "exists already" in said or (name == "gate" and code in (1, 3)):
                break
            return f"the next call of {name} ends with {code}: {said[-300:]}"
        if code not in CLEAN_CODES:
            said = (self.room / "log").read_text(errors="replace")
            return f"the next call of {name} ends with {code}: {said[-300:]}"
        return _difference(expected, contents(out))

    def _fresh(self, name: str, place: str) -> Path:
        out = self.room / place
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        if name == "card":
            linked(self.world / "made" / "rtn-w4a16", out / "made" / "rtn-w4a16")
            (out / "made" / "rtn-w4a16" / "README.md").unlink()
        return out

    def _undisturbed(self, name: str) -> tuple[float, dict[str, Any]]:
        if name not in self._known:
            out = self._fresh(name, "out")
            started = time.monotonic()
            code = _waited(_forked(COMMANDS[name](self.world, out), self.room / "log"))
            said = (self.room / "log").read_text(errors="replace")
            assert code == 0 or name == "gate", f"{name}: {code} {said}"
            self._known[name] = time.monotonic() - started, contents(out)
        return self._known[name]


def _few_descriptors(share: float) -> None:
    most = 8 + int(40 * share)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _small_files(share: float) -> None:
    most = int(2_000_000 * share**3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def _little_memory(share: float) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + int((400 << 20) * share)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # OpenBLAS asks for its buffers for ever.
    resource.setrlimit(resource.RLIMIT_CPU, (HANGS_S, resource.RLIM_INFINITY))


LIMITS: dict[str, Callable[[float], None]] = {
    "few descriptors": _few_descriptors,
    "files that may not grow": _small_files,
    "little memory": _little_memory,
}


def _forked(
    arguments: list[str],
    log: Path,
    limit: Callable[[float], None] = lambda share: None,
    share: float = 1.0,
) -> int:
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")
        limit(share)
        code = main(arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        sys.stdout.flush()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _waited(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def contents(folder: Path) -> dict[str, Any]:
    """Every file below a folder, hidden ones too, without what differs from run to run."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name.startswith("cache/") or re.match(r"runs/(logs|lease|state)", name):
            continue
        name = ATTEMPT.sub(r"\1TOKEN", name)
        if path.is_dir():
            found[f"{name}/"] = None
        elif path.suffix == ".json":
            found[name] = _steady(json.loads(path.read_bytes()))
        elif path.suffix == ".html":
            found[name] = FIGURES.sub(b"", path.read_bytes())
        elif path.suffix in (".md", ".xml"):
            found[name] = DATE.sub(b"", path.read_bytes())
        else:
            found[name] = path.read_bytes()
    return found


def _steady(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _steady(value) for key, value in data.items() if key not in VOLATILE}
    if isinstance(data, str):
        return ATTEMPT.sub(r"\1TOKEN", data)
    return [_steady(value) for value in data] if isinstance(data, list) else data


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    if more := sorted(found.keys() - expected.keys()):
        return f"left over: {', '.join(more)}"
    if less := sorted(expected.keys() - found.keys()):
        return f"missing: {', '.join(less)}"
    changed = [name for name in expected if expected[name] != found[name]]
    return f"not the same: {', '.join(changed)}" if changed else ""
