"""Container images of the engines, and how a container gets its GPUs."""

import re
from dataclasses import dataclass
from pathlib import Path

from quantkit.engine import label
from quantkit.engine.vllm_program import VERSION
from quantkit.errors import EngineError, HardwareError
from quantkit.serving.plan import Plan

VLLM_IMAGES = {
    "nvidia": f"vllm/vllm-openai:v{VERSION}",
    "amd": f"vllm/vllm-openai-rocm:v{VERSION}",
    "cpu": f"vllm/vllm-openai-cpu:v{VERSION}",
}
# By the GPU's API; the plain image computes on the CPU.
LLAMA_CPP = "ghcr.io/ggml-org/llama.cpp"
LLAMA_CPP_IMAGES = {
    "nvidia": f"{LLAMA_CPP}:server-cuda",
    "amd": f"{LLAMA_CPP}:server-rocm",
    "intel": f"{LLAMA_CPP}:server-intel",
    "cpu": f"{LLAMA_CPP}:server",
}
RESOURCES = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/i915"}
"""Resource names of GPUs in the Kubernetes device plug-ins."""
IMAGE = re.compile(
    r"([\w.-]+(:\d+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]*)?(@sha256:[0-9a-f]{64})?"
)
TAG = re.compile(r":\w[\w.-]*")
RELEASE = re.compile(r"\d+\.\d+\.\d+(\.post\d+)?")
ADDRESS = ("--host", "--port")
"""Flags that differ inside a container."""
MOUNT = "/model"
PORT = 8000
"""Inside a container."""


@dataclass(frozen=True)
class Container:
    """A plan as a container runs it."""

    image: str
    entrypoint: tuple[str, ...]
    arguments: tuple[str, ...]
    mounts: tuple[tuple[str, str], ...]
    """Local folders, and their paths inside."""
    health: tuple[str, ...]
    """A program inside that succeeds when the server is healthy."""


def check(image: str | None) -> None:
    """Refuse anything that is not an image's name."""
    if image is not None and not (IMAGE.fullmatch(image) or TAG.fullmatch(image)):
        raise EngineError(
            f"'{image}' is not a container image; write NAME:TAG, or :TAG for another version of "
            "the default one"
        )


def tag_of(version: str) -> str | None:
    """The image's tag for that vLLM version; unreleased ones have none."""
    return f":v{version}" if RELEASE.fullmatch(version) else None


def image_for(plan: Plan, asked: str | None = None) -> str:
    """The engine's image for the GPU's vendor, or the requested one."""
    check(asked)
    if asked is not None and not asked.startswith(":"):
        return asked
    vendor = plan.demand.gpu.vendor
    images = VLLM_IMAGES if plan.engine == "vllm" else LLAMA_CPP_IMAGES
    if vendor not in images:
        raise HardwareError(
            f"there is no default image of {label(plan.engine)} for {plan.demand.gpu.name}; "
            "name one with --image, or serve it without a container"
        )
    return images[vendor] if asked is None else images[vendor].partition(":")[0] + asked


def container(plan: Plan, image: str | None = None) -> Container:
    """The same flags, with paths and port as they are inside."""
    image = image_for(plan, image)
    places = _mounts(plan)
    flags = [flag.words for flag in plan.flags if flag.name.partition("=")[0] not in ADDRESS]
    flags = [("--host", "0.0.0.0"), ("--port", str(PORT)), *flags]
    words = [_inside(word, places) for flag in flags for word in flag]
    model = _inside(plan.target.path, places)
    mounts = tuple((_whole(here), there) for here, there in places)
    url = f"http://127.0.0.1:{PORT}/health"
    if plan.engine == "vllm":
        # The image certainly has Python; curl may be missing.
        code = f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"
        return Container(
            image,
            ("vllm", "serve"),
            (model, *words),
            mounts,
            ("python3", "-c", code),
        )
    return Container(
        image,
        ("/app/llama-server",),
        ("-m", model, *words),
        mounts,
        ("curl", "-fsS", url),
    )


def _mounts(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Folders of the model, its draft and its adapters, each under its own name."""
    found = [(str(plan.target.folder), MOUNT)]
    draft = plan.demand.draft
    if draft is not None and draft.target is not None:
        found.append((str(draft.target.folder), "/draft"))
    for adapter in plan.demand.adapters:
        is_file = adapter.path.endswith(".gguf")
        folder = str(Path(adapter.path).parent) if is_file else adapter.path
        found.append((folder, f"/adapters/{adapter.name}"))
    return tuple(found)


def _inside(word: str, places: tuple[tuple[str, str], ...]) -> str:
    """A word of the command with folder paths as inside; the longest match counts."""
    for here, there in sorted(places, key=lambda place: -len(place[0])):
        # A path may follow NAME= or be inside JSON.
        word = re.sub(rf'(?<![^="]){re.escape(here)}(?=$|[/"])', there, word)
    return word


def _whole(folder: str) -> str:
    """The absolute path of an existing folder; the file may be used from elsewhere."""
    path = Path(folder)
    return str(path.resolve()) if path.is_dir() else folder
