"""A running server: started, waited for, tested with one request, and always stopped."""

import json
import os
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.engine import http
from quantkit.engine.process import Child
from quantkit.errors import EngineError
from quantkit.parsing import parse_json
from quantkit.progress import Progress, Silent
from quantkit.serving.plan import Plan
from quantkit.serving.program import Program

PROMPT = "The capital of France is"
MAX_TOKENS = 16
ANSWER_SECONDS = 300.0
"""The first request may compile kernels."""


@dataclass(frozen=True)
class Answer:
    """What the model wrote to one real request."""

    text: str
    seconds: float


@dataclass(frozen=True)
class Server:
    """A healthy server and its process."""

    url: str
    plan: Plan
    child: Child
    seconds: float
    """From start to healthy."""

    def ask(self) -> Answer:
        """One real request, greedy and short; raises where the answer is empty."""
        body = {
            "model": self.plan.served_name,
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        start = time.monotonic()
        try:
            answer = _post(f"{self.url}/v1/completions", body, ANSWER_SECONDS, _key(self.plan))
            text = answer["choices"][0]["text"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            # An engine whose worker is gone may look healthy until it gets a request.
            time.sleep(0.5)
            why = str(error) or type(error).__name__
            raise self.child.failure(
                f"{self.child.name} is healthy but fails a request ({why})"
            ) from error
        if not isinstance(text, str):
            raise EngineError(f"{self.child.name} answered a request without text")
        return Answer(text, time.monotonic() - start)

    def stay(self, tick: float = 0.5) -> None:
        """Wait until it dies, which raises; Ctrl-C ends the wait."""
        while True:
            self.child.check()
            time.sleep(tick)


def refuse_taken(host: str, port: int) -> None:
    """Refuse to start anything if another program listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: a port that was just released counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        model = _served_at(host, port)
        what = f", where {model} is served" if model else ""
        reason = getattr(error, "strerror", None) or str(error)
        raise EngineError(
            f"cannot listen on port {port} of {host}{what} ({reason}); choose another port with "
            "--port"
        ) from error


@contextmanager
def running(
    plan: Plan,
    program: Program,
    timeout: float,
    progress: Progress | None = None,
    log: Path | None = None,
) -> Iterator[Server]:
    """The plan's server, once it is healthy; all its processes are gone afterwards."""
    progress = progress or Silent()
    host, port = plan.address
    refuse_taken(host, port)
    name = {"vllm": "vLLM", "llama.cpp": "llama-server"}[plan.engine]
    url = f"http://{_reached_at(host)}:{port}"
    with Child(plan.command(program.words), log=log, name=name) as child:
        progress.start(f"{name} starts", int(timeout), "s")
        try:
            seconds = _wait(child, url, timeout, progress)
        finally:
            progress.finish()
        yield Server(url, plan, child, seconds)


def _wait(child: Child, url: str, timeout: float, progress: Progress) -> float:
    """Seconds until it is healthy; raises when it dies or takes longer."""
    start, reported = time.monotonic(), 0
    while True:
        child.check()
        if _is_healthy(url):
            child.check()  # otherwise the health check may reach another server
            return time.monotonic() - start
        passed = time.monotonic() - start
        if passed > timeout:
            child.end()
            raise child.failure(f"{child.name} was not ready within {timeout:.0f} s")
        progress.advance(int(passed) - reported)
        reported = int(passed)
        progress.status((child.words(1) or [""])[-1].strip())
        time.sleep(0.25)


def _is_healthy(url: str) -> bool:
    try:
        status, _ = http.ask("GET", f"{url}/health")
    except (OSError, ValueError):
        return False
    return status == 200


def _served_at(host: str, port: int) -> str | None:
    """The model of a server that already listens there, if it is one."""
    try:
        url = f"http://{_reached_at(host)}:{port}/v1/models"
        _, content = http.ask("GET", url, timeout_s=2)
        return str(parse_json(content)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _key(plan: Plan) -> str | None:
    """The API key that the server requires, if flags or the environment set one."""
    named = "VLLM_API_KEY" if plan.engine == "vllm" else "LLAMA_API_KEY"
    return plan.value("--api-key") or os.environ.get(named)


def _post(url: str, body: dict[str, Any], timeout: float, key: str | None) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, content = http.ask("POST", url, body, headers, timeout)
    if status != 200:
        raise ValueError(f"HTTP {status}")
    return parse_json(content)


def _reached_at(host: str) -> str:
    """The address at which to reach a server that listens on `host`."""
    if host in ("0.0.0.0", "", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def curl(plan: Plan, url: str) -> str:
    """A request for a terminal."""
    if plan.target.can_chat:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
        place = "chat/completions"
    else:
        body, place = {"prompt": PROMPT}, "completions"
    text = shlex.quote(json.dumps({"model": plan.served_name, **body, "max_tokens": 64}))
    key = " -H 'Authorization: Bearer YOUR_KEY'" if _key(plan) else ""
    return f"curl {url}/v1/{place} -H 'Content-Type: application/json'{key} \\\n  -d {text}"
