"""Servers that mean no good, or are broken in odd ways: every answer ends, and in little memory."""

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from quantkit.cli.main import main
from quantkit.engine import http
from quantkit.errors import ScoreError
from quantkit.scoring import endpoint

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def whole(content):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return OK + b"Content-Length: %d\r\n\r\n" % len(content) + content


@contextmanager
def server(answer):
    """`answer` is what every request gets: bytes, or a function that is given the connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve(connection):
        with connection:
            try:
                connection.recv(1 << 16)
                connection.sendall(answer) if isinstance(answer, bytes) else answer(
                    connection, ended
                )
            except OSError:
                pass

    def accept():
        while not ended.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ended.set()
        listening.close()


def endless(connection, ended):
    connection.sendall(OK + b"Connection: close\r\n\r\n[")
    while not ended.is_set():
        connection.sendall(b"0," * (1 << 19))


def dripping_body(connection, ended):
    connection.sendall(OK + b"Content-Length: 100000\r\n\r\n")
    while not ended.wait(0.05):
        connection.sendall(b" ")


def dripping_headers(connection, ended):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    n = 0
    while not ended.wait(0.05):
        n += 1
        connection.sendall(b"X-%d: a\r\n" % n)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(endpoint, "BACKOFF_S", 0.01)


def test_an_endless_answer_is_not_read_to_its_end():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with server(endless) as url, pytest.raises(ScoreError, match="more than 16 MiB"):
        endpoint.Endpoint(url)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) >> 10 < 200  # MiB


@pytest.mark.parametrize("answer", [dripping_body, dripping_headers])
def test_a_drip_does_not_outlive_the_deadline(answer):
    begun = time.monotonic()
    with server(answer) as url, pytest.raises(ScoreError, match="gave no answer within 1 s"):
        endpoint.Endpoint(url, timeout_s=1)
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (whole(b"[" * 100_000), "nested deeper"),
        (whole(b'{"data": ' * 5000), "nested deeper"),
        (whole({"data": [{"id": "a", "max_model_len": "abc"}]}), "not a number of tokens"),
        (whole({"data": [{"id": "a", "max_model_len": -1}]}), "not a number of tokens"),
        (whole({"data": [{"id": "a", "max_model_len": True}]}), "not a number of tokens"),
        (whole({"data": [{"id": ["a"]}]}), "lists no models"),
        (whole(b'{"data": [{"id": "\\ud800"}]}'), "half a character"),
        (whole(b'{"data": [{"id": "a", "max_model_len": %s}]}' % (b"1" * 401)), "401 digits"),
        (whole("{}".encode("utf-16")), "UTF-16"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "cannot be reached"),
        (b"\x00\x01\x02\r\n\r\n", "cannot be reached"),
        (b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n", "answered 302"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", "no models"),
    ],
)
def test_what_is_no_list_of_models_is_refused(answer, words):
    with server(answer) as url, pytest.raises(ScoreError, match=words):
        endpoint.Endpoint(url)


def one_after_another(*answers):
    left = list(answers)

    def answer(connection, ended):
        connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    return answer


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-1.0", None),
        ("-" + "1" * 400, "a number has 401 digits"),
        ("-1e999", "gives -inf as a log-probability"),
        ("NaN", "gives nan as a log-probability"),
        ("-Infinity", "gives -inf as a log-probability"),
        ('"-1.0"', "gives no log-probabilities"),
        ("true", "gives no log-probabilities"),
    ],
)
def test_a_log_probability_that_is_none(value, words):
    card = {"data": [{"id": "a", "max_model_len": 64}]}
    told = {"tokens": ["x", "y"], "token_logprobs": [None, 0], "top_logprobs": [None, {"y": -1.0}]}
    answer = json.dumps({"model": "a", "choices": [{"index": 0, "logprobs": told}]})
    answer = answer.replace("[null, 0]", f"[null, {value}]")
    with server(one_after_another(whole(card), whole(answer.encode()))) as url:
        served = endpoint.Endpoint(url)
        if words is None:
            assert served.echo_text("xy").own == [-1.0]
            return
        with pytest.raises(ScoreError, match=words):
            served.echo_text("xy")


def test_a_password_in_an_address_is_never_shown(tmp_path, capsys):
    def no(connection, ended):
        connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

    with server(no) as url:
        address = url.replace("http://", "http://me:geheim@")
        assert main(["score", "demo", "--tasks", "python_docs", "--server", address]) == 3
    assert main(["score", "demo", "--tasks", "python_docs", "--server", "ftp://me:geheim@x"]) == 3
    assert (
        main(["score", "demo", "--tasks", "python_docs", "--server", "http://me:geheim@x:y"]) == 3
    )
    assert main(["bench", "--backend", "server", "--server", "http://me:geheim@"]) == 3
    seen = capsys.readouterr()
    assert "geheim" not in seen.out + seen.err
    assert "401" in seen.err


def test_a_name_and_password_in_an_address_are_used():
    asked = []

    listening = socket.create_server(("127.0.0.1", 0))

    def once():
        connection, _ = listening.accept()
        with connection:
            asked.append(connection.recv(1 << 16))
            connection.sendall(whole({"data": [{"id": "a"}]}))

    thread = threading.Thread(target=once)
    thread.start()
    found = endpoint.Endpoint(f"http://me:ge%3Aheim@127.0.0.1:{listening.getsockname()[1]}")
    thread.join()
    listening.close()
    assert b"Authorization: Basic bWU6Z2U6aGVpbQ==" in asked[0]
    assert "geheim" not in found.url


def test_addresses_without_passwords():
    assert http.without_password("http://a:b@c:1/v1") == "http://c:1/v1"
    assert http.without_password("http://c:1/v1") == "http://c:1/v1"
    assert http.without_password("ftp://a:b@[") == "ftp://["


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(300, 4096, 1024), (300, 600, 344)])
def test_connections_are_as_many_as_the_process_may_open(soft, hard, allowed):
    """The soft limit is raised to what is needed, at most to the hard one."""
    code = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from quantkit.scoring.endpoint import connections\n"
        "print(connections(1024), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(allowed), str(min(hard, 1024 + 256))]
