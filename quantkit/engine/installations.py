"""Engines installed on this machine: vLLM in its environments, llama.cpp's server."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

VERSION_SECONDS = 20
_DISTRIBUTION = re.compile(r"vllm(?P<cpu>_cpu)?-(?P<version>[^-]+)\.dist-info")
_BUILD = re.compile(r"version: (\S+ \([0-9a-f]+\))")


@dataclass(frozen=True)
class Installation:
    """An engine, and how to name it in other commands."""

    version: str
    option: str


def vllm(folder: Path) -> list[Installation]:
    """vLLM in this Python, in the one on the PATH, and in environments in a folder."""
    pythons = [Path(sys.executable)]
    if script := shutil.which("vllm"):
        pythons.append(Path(script).resolve().with_name("python"))
    pythons += sorted(folder.glob("*/bin/python"))
    found: dict[Path, Installation] = {}
    for number, python in enumerate(pythons):
        home = python.parent.parent
        if home.resolve() not in found and (version := _installed(home)):
            # Our own Python is found without naming it.
            option = "" if number == 0 else shlex.join(["--python", str(python)])
            found[home.resolve()] = Installation(version, option)
    return list(found.values())


def _installed(home: Path) -> str | None:
    """The vLLM version of an environment, read from its files: asking its Python takes seconds."""
    for path in sorted(home.glob("lib/python*/site-packages/vllm*.dist-info")):
        if match := _DISTRIBUTION.fullmatch(path.name):
            kind = " for CPUs" if match["cpu"] or "+cpu" in match["version"] else ""
            return f"{match['version']}{kind}"
    return None


def llama_server() -> Installation | None:
    """llama.cpp's server on the PATH, and the build it reports."""
    program = shutil.which("llama-server")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
        build = _BUILD.search(done.stdout + done.stderr)
    except (OSError, subprocess.TimeoutExpired):
        build = None
    return Installation(build[1] if build else "unknown build", program)
