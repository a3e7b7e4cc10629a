"""Programs that behave like serving engines, well or badly, for tests of what surrounds them."""

import stat
import sys
from pathlib import Path

# Serves what a client needs of vLLM and llama.cpp, or fails in the way that it is told to.
SERVER = """#!{python}
import http.server, json, os, signal, subprocess, sys, time

how, words = {how!r}, sys.argv[1:]
port = int(words[words.index("--port") + 1])
name_flag = "--served-model-name" if "--served-model-name" in words else "--alias"
name = words[words.index(name_flag) + 1]
open({seen!r}, "w").write(json.dumps(words))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
open({pids!r}, "w").write(f"{{os.getpid()}} {{worker.pid}}")
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("loading", flush=True)
if how == "dies":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
if how == "hangs":
    time.sleep(120)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {{"data": [{{"id": name}}]}} if "models" in self.path else {{}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if how == "fails":
            print("RuntimeError: scalar path not implemented!", flush=True)
            self.answer(500, {{"error": "EngineCore encountered an issue"}})
        elif how == "empty":
            self.answer(200, {{"choices": []}})
        elif asked["model"] != name:
            self.answer(404, {{}})
        else:
            self.answer(200, {{"choices": [{{"text": " Paris, and so on"}}]}})
        if how == "dies later":
            server.shutdown_soon = True

    def answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


server = http.server.HTTPServer(("127.0.0.1", port), Handler)
server.shutdown_soon = False
server.timeout = 0.1
while not server.shutdown_soon:
    server.handle_request()
sys.exit("Cannot allocate memory")
"""
PYTHON = """#!{python}
import sys
print({answer!r})
"""


class FakeEngine:
    """An environment with vLLM, and llama.cpp's server, that behave as one is told."""

    def __init__(self, folder: Path, how: str = "serves") -> None:
        folder.mkdir()
        self._seen, self._pids = folder / "seen", folder / "pids"
        self.python, self.program = folder / "python", folder / "vllm"
        answer = '[true, {"vllm": "0.26.0"}]'
        if how == "absent":
            answer = "[false, {}]"
        _write(self.python, PYTHON.format(python=sys.executable, answer=answer))
        text = SERVER.format(
            python=sys.executable, how=how, seen=str(self._seen), pids=str(self._pids)
        )
        _write(self.program, text)

    @property
    def was_started(self) -> bool:
        return self._pids.exists()

    @property
    def words(self) -> list[str]:
        """What it was called with."""
        import json

        return list(json.loads(self._seen.read_text()))

    @property
    def pids(self) -> list[int]:
        """It and its worker."""
        return [int(number) for number in self._pids.read_text().split()]


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
