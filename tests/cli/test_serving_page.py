"""What docs/serving.md shows is what its commands print; engines are asked in their own tests."""

import re
import shlex
import shutil

import pytest
from transcripts import shown, words

from quantkit.engine import vllm_program


@pytest.fixture
def folder(demo_made, tmp_path, monkeypatch):
    """Where the page's commands are given, on a machine without vLLM."""
    shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "out" / "fp8-dynamic")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_program, "find", lambda *_: None)
    return tmp_path


@pytest.mark.parametrize("option", ["--context", "--count"], ids=["plan", "files"])
def test_plans_and_files(folder, run_cli, option):
    shown_here = shown("serving.md", f"quantkit serve out/fp8-dynamic --gpu L40S {option}")
    for command, output in shown_here.items():
        result = run_cli([*shlex.split(command)[1:], *(["--force"] if "--emit" in command else [])])
        assert result.code == 0, result.stderr
        assert words(output) == words(result.stdout)


def test_flags_of_a_server_on_a_cpu(folder, run_cli):
    ((command, output),) = shown("serving.md", "--users 4 --port 8321").items()
    assert "--users 4 --port 8321 --once" in command
    asked = ["serve", "out/fp8-dynamic", "--gpu", "cpu", "--users", 4, "--port", 8321, "--dry-run"]
    real = run_cli(asked).stdout.replace("fp8-dynamic", "int8-w8a8")
    for part in (real, output):
        assert part.count("Why, for this machine's CPU") == 1
    flags, reasons = real.split("\n\n")[:2]
    assert words(reasons) in words(output)
    assert words(flags.partition("\n")[2]) in words(output)


def test_how_a_server_answered(run_cli):
    from quantkit.serving.server import PROMPT

    (output,) = shown("serving.md", "--users 4 --port 8321").values()
    said = rf"vLLM [\d.]+ was ready after \d+ s and answered '{PROMPT}' in [\d.]+ s with:\n  '.*'\n"
    assert re.search(rf"\n{said}\nCall it:\ncurl http://127.0.0.1:8321/v1/", output)
