"""`make demo` from a fresh checkout: what it says, and what it installs with.

Python, uv and pip are stand-ins that write down how they were called.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")

TELLS = '#!/bin/sh\necho "$(basename "$0") $*" >> "{log}"\n{then}\n'
MAKES_VENV = """\
if [ "$2" = venv ]; then mkdir -p .venv/bin; cp "{bin}"/venv-* .venv/bin
  for file in .venv/bin/venv-*; do mv "$file" ".venv/bin/${{file##*venv-}}"; done; fi"""


@pytest.fixture
def make(tmp_path):
    """Runs make in a fresh checkout: what it printed, and who was called."""
    checkout, tools, log = tmp_path / "checkout", tmp_path / "tools", tmp_path / "log"
    checkout.mkdir()
    tools.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copyfile(ROOT / name, checkout / name)

    def tool(name, then=""):
        (tools / name).write_text(TELLS.format(log=log, then=then))
        (tools / name).chmod(0o755)

    def run(*arguments, uv=None):
        log.write_text("")
        tool("python3", MAKES_VENV.format(bin=tools))
        for name in ("venv-pip", "venv-python", "venv-quantkit"):
            tool(name)
        if uv is not None:
            tool("uv", f"exit {uv}")
        needed = {name: shutil.which(name) for name in ("sh", "date", "touch", "test", "make")}
        needed |= {n: shutil.which(n) for n in ("basename", "mkdir", "cp", "mv", "cat", "rm")}
        for name, place in needed.items():
            if place and not (tools / name).exists():
                (tools / name).symlink_to(place)
        done = subprocess.run(
            ["make", *arguments],
            cwd=checkout,
            env={**os.environ, "PATH": str(tools), "MAKEFLAGS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, log.read_text().splitlines()

    return run


def test_demo_says_what_is_installed_and_how_long_it_takes(make):
    told, called = make("demo")
    assert "installing into .venv: quantkit and what the demo needs" in told
    assert "a download of one to five GB" in told
    assert "installed in" in told
    assert "the demo quantises a small model ten ways" in told
    assert called[-2:] == ["pip install --quiet --editable .", "quantkit demo"]
    told, called = make("demo")
    assert "installing" not in told, "it is there"
    assert called == ["quantkit demo"]


def test_uv_installs_where_there_is_one(make):
    told, called = make("demo", uv=0)
    assert "installed in" in told
    (installed,) = [line for line in called if " install " in line]
    assert installed.startswith("uv pip install --quiet --python .venv/bin/python")
    assert called[-1] == "quantkit demo"


def test_what_uv_cannot_get_pip_tries_again(make):
    _, called = make("demo", uv=1)
    installed = [line.split()[0] for line in called if " install " in line]
    assert installed == ["uv", "pip"]
    assert called[-1] == "quantkit demo"
