"""An OpenAI server that answers as scripted: in a thread, or as a program that plays an engine.

    python fake_openai.py serve DIR --port N [--served-model-name NAME] ...

As a program it also speaks a few lines of vLLM's log, and obeys the file `script.json` of DIR.
"""

import asyncio
import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass
class Script:
    """How one request is answered."""

    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    cut_after: int | None = None
    """Pieces until the connection is closed."""
    model: str | None = None
    error_after: int | None = None
    garbage: bool = False
    pieces: int | None = None
    """Less than was asked for."""
    tokens_per_piece: int = 1
    mute_end: bool = False
    """The last token is half a character, whose text is nothing."""


class FakeServer:
    """Everything it was sent is kept."""

    def __init__(
        self, script=lambda number, body: Script(), model="fake", metrics=None, slots=None
    ):
        self.script, self.model, self.metrics = script, model, metrics
        self.slots = slots
        self.bodies = []
        self._free = None

    async def serve(self, port):
        self._free = asyncio.Semaphore(self.slots) if self.slots else None
        return await asyncio.start_server(self._handle, "127.0.0.1", port)

    async def _handle(self, reader, writer):
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader, writer):
        _, path, _ = (await reader.readline()).decode().split()
        length = 0
        while line := (await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        content = await reader.readexactly(length)
        if path == "/v1/completions":
            body = json.loads(content)
            self.bodies.append(body)
            script = self.script(len(self.bodies) - 1, body)
            if self._free is None:
                await self._stream(writer, body, script)
            else:
                async with self._free:
                    await self._stream(writer, body, script)
            return
        known = {
            "/health": "",
            "/version": json.dumps({"version": "0.0-fake"}),
            "/v1/models": json.dumps({"data": [{"id": self.model, "owned_by": "vllm"}]}),
        }
        if self.metrics is not None:
            known["/metrics"] = self.metrics(len(self.bodies))
        text = known.get(path)
        _plain(writer, 404 if text is None else 200, text or "nothing here")
        await writer.drain()

    async def _stream(self, writer, body, script):
        if script.status != 200:
            await asyncio.sleep(script.first_s)
            _plain(writer, script.status, json.dumps({"error": {"message": "scripted trouble"}}))
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        n = script.pieces or body["max_tokens"]
        model = script.model or body["model"]
        for piece in range(n):
            await asyncio.sleep(script.first_s if piece == 0 else script.gap_s)
            if piece == script.cut_after:
                return
            if piece == script.error_after:
                _event(writer, json.dumps({"error": {"message": "the engine fell over"}}))
                break
            ends = piece == n - 1
            text = "" if ends and script.mute_end else "a"
            choice = {"text": text, "finish_reason": "length" if ends else None}
            event = json.dumps({"model": model, "choices": [choice]})
            _event(writer, "{half" if script.garbage else event)
            await writer.drain()
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": n * script.tokens_per_piece,
        }
        _event(writer, json.dumps({"model": model, "choices": [], "usage": usage}))
        _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _event(writer, text):
    data = f"data: {text}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _plain(writer, status, text):
    data = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


@contextmanager
def running(server):
    """Its address, while it serves in a thread."""
    ready = threading.Event()
    known = {}

    async def main():
        known["loop"], known["stop"] = asyncio.get_running_loop(), asyncio.Event()
        listening = await server.serve(0)
        known["port"] = listening.sockets[0].getsockname()[1]
        ready.set()
        await known["stop"].wait()
        listening.close()  # answers under way are dropped when the loop ends

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{known['port']}"
    finally:
        known["loop"].call_soon_threadsafe(known["stop"].set)
        thread.join(10)


def fake_python(folder, package="vllm"):
    """An executable that stands for a Python with vLLM: whatever module is run, it is this file."""
    path = folder / "python"
    has = f'if [ "$1" = -c ]; then echo "[true, {{\\"{package}\\": \\"0.0\\"}}]"; exit; fi'
    path.write_text(f'#!/bin/sh\n{has}\nshift 2\nexec {sys.executable} {__file__} "$@"\n')
    path.chmod(0o755)
    return path


def _say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main():
    _, _, folder, *rest = sys.argv
    options = {a: b for a, b in pairwise(rest) if a.startswith("--")}
    file = Path(folder) / "script.json"
    script = json.loads(file.read_text()) if file.exists() else {}
    _say(" ".join(sys.argv[1:]))
    if script.get("dies"):
        sys.exit(f"torch.OutOfMemoryError: CUDA out of memory. {script['dies']}")
    if script.get("dies_with") in sys.argv:
        sys.exit(f"unsupported: {script['dies_with']}")
    if script.get("hangs"):
        time.sleep(600)
    _say("Model loading took 1.50 GiB memory and 0.1 seconds")
    _say("GPU KV cache size: 12,345 tokens, Maximum concurrency for 8 tokens per request: 2x")
    answered = Script(**script.get("answer", {}))
    slots = int(options.get("--max-num-seqs", 0)) or None
    server = FakeServer(lambda number, body: answered, options["--served-model-name"], slots=slots)
    dies_at = script.get("dies_at_request")

    def scripted(number, body):
        if dies_at is not None and number >= dies_at:
            _say("RuntimeError: CUDA out of memory")
            os._exit(1)
        return answered

    server.script = scripted

    async def forever():
        listening = await server.serve(int(options["--port"]))
        async with listening:
            await listening.serve_forever()

    asyncio.run(forever())


if __name__ == "__main__":
    main()
