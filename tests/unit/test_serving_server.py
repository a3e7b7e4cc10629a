"""What is known of a server before and after it starts."""

import http.server
import json
import shlex
import socket
import threading
from contextlib import contextmanager

import pytest

from quantkit.advise import shape
from quantkit.errors import EngineError
from quantkit.hardware import gpus
from quantkit.serving import target
from quantkit.serving.plan import Demand, make
from quantkit.serving.server import curl, refuse_taken


@contextmanager
def another(answer):
    """A server of somebody else's."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_taken_port_is_told_with_the_model_that_is_served_there():
    with (
        another(json.dumps({"data": [{"id": "someone-else"}]}).encode()) as port,
        pytest.raises(EngineError, match=r"where someone-else is served .*--port"),
    ):
        refuse_taken("127.0.0.1", port)


@pytest.mark.parametrize("answer", [b"", b"hello", b"[]", b'{"data": []}'])
def test_a_port_taken_by_anything_else_is_refused_too(answer):
    with another(answer) as port, pytest.raises(EngineError, match=rf"port {port} of 127.0.0.1"):
        refuse_taken("127.0.0.1", port)


def test_a_port_taken_by_what_speaks_no_http_is_refused_too():
    """Such as SSH."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def greet():
            with taken.accept()[0] as other:
                other.sendall(b"SSH-2.0-none\r\n")
                other.recv(1024)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(EngineError, match="cannot listen on port"):
            refuse_taken("127.0.0.1", taken.getsockname()[1])
        thread.join()


def test_a_request_has_the_password_that_the_server_asks_for(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    model = target.planned(shape.of("8B"), None, "8B")
    plan = make(model, Demand(gpus.find("H200")))
    assert "Authorization" not in curl(plan, "http://a")
    assert "Authorization" in curl(plan.with_extra(["--api-key", "secret"]), "http://a")
    assert "secret" not in curl(plan.with_extra(["--api-key", "secret"]), "http://a")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "Authorization" in curl(plan, "http://a")


def test_a_free_port_is_no_fault(port):
    refuse_taken("127.0.0.1", port)
    with pytest.raises(EngineError, match="cannot listen on port"):
        refuse_taken("192.0.2.1", port)  # an address that no machine has


@pytest.mark.parametrize("can_chat", [True, False])
def test_the_request_for_a_terminal_is_one_that_a_shell_reads(can_chat):
    wanted = target.Target("out/x", "it's", shape.of("1B"), None, False, can_chat=can_chat)
    words = shlex.split(curl(make(wanted, Demand(gpus.find("L40S"))), "http://127.0.0.1:8000"))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert ("messages" in body) is can_chat
    assert words[1].endswith("/chat/completions" if can_chat else "/v1/completions")
