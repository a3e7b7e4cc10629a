"""What this machine has: versions, devices, memory, and the optional engines."""

import os
import platform
import shutil
from importlib import metadata

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
# Each lives best in an environment of its own: they pin other versions of torch.
ENGINES = {
    "vllm": "serves the checkpoints; pip install vllm, in its own environment",
    "llmcompressor": "a second quantiser; pip install 'quantkit-llm[llmcompressor]'",
}
RIVALS = ("llm-quantkit", "quantkit")


def examine() -> dict[str, dict[str, str]]:
    """Findings by section, ready to be printed."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "optional engines": _engines(),
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


def _engines() -> dict[str, str]:
    return {name: _installed(name) or f"not installed ({what})" for name, what in ENGINES.items()}


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
