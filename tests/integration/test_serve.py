"""Servers of real engines: llama.cpp in the normal suite, vLLM for CPUs in the slow one."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

# What llama-server does with these flags, by the same code in its Python package.
LLAMA_SERVER = """#!{python}
import sys, time
import xllamacpp

words = sys.argv[1:]
def value(flag):
    return words[words.index(flag) + 1]
wanted = xllamacpp.CommonParams()
wanted.model.path = value("-m")
wanted.n_ctx = int(value("--ctx-size"))
wanted.n_parallel = int(value("--parallel"))
wanted.hostnames, wanted.port = [value("--host")], int(value("--port"))
wanted.endpoint_metrics = "--metrics" in words
wanted.cpuparams.n_threads = 1
wanted.warmup = False
server = xllamacpp.Server(wanted)
print("listening at", server.listening_address, flush=True)
while True:
    time.sleep(1)
"""


def test_llama_cpp_serves_the_demo_model(run_cli, demo_made, port, tmp_path):
    pytest.importorskip("xllamacpp")
    program = tmp_path / "llama-server"
    program.write_text(LLAMA_SERVER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    command = ["serve", demo_made / "gguf-q8_0", "--gpu", "cpu", "--port", port, "--users", "2"]
    result = run_cli([*command, "--llama-server", program, "--once", "--json", "-q"])
    assert result.code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["engine"] == "llama.cpp"
    assert data["context"] == 1024
    assert data["answer"].strip()


def test_a_bare_gguf_file_keeps_to_the_context_that_it_was_made_for(run_cli, demo_made):
    (path,) = (demo_made / "gguf-q8_0").glob("demo*.gguf")
    result = run_cli(["serve", path, "--gpu", "L4", "--dry-run", "--json"])
    assert json.loads(result.stdout)["context"] == 1024
    result = run_cli(["serve", path, "--gpu", "L4", "--dry-run", "--context", "4096"])
    assert result.code == 3
    assert "allows contexts of 1,024 tokens, not 4,096" in result.stderr


def test_a_gguf_file_that_quantkit_wrote_is_served_as_its_folder(run_cli, demo_made, tmp_path):
    folder = demo_made / "gguf-q8_0"
    (path,) = folder.glob("demo*.gguf")

    def plan(what):
        result = run_cli(["serve", what, "--gpu", "L4", "--dry-run", "--json"])
        assert result.code == 0, result.stderr
        return json.loads(result.stdout)

    assert plan(path) == plan(folder)
    assert plan(path)["served_name"] == "gguf-q8_0"
    # without the manifest beside it, it is a file of anybody
    elsewhere = tmp_path / "model.gguf"
    elsewhere.write_bytes(path.read_bytes())
    assert plan(elsewhere)["served_name"] == "model"


@pytest.mark.slow
def test_vllm_for_cpus_serves_the_demo_model(run_cli, demo_made, port, tmp_path, monkeypatch):
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON names no Python with vLLM")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    # Threads that are bound to cores wait for each other forever where others use these too.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = tmp_path / "log"
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "cpu", "--port", port, "--users", "2"]
    result = run_cli([*command, "--python", python, "--log", log, "--once", "--json", "-q"])
    assert result.code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["version"].startswith("vLLM 0.")
    assert data["answer"].strip()
    assert "Application startup complete" in Path(log).read_text()
