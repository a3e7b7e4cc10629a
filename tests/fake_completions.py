"""A fake of vLLM's completions API that answers from a real model, with faults where told to."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

MAX_LENGTH = 62
"""Tokens of a window that fits its context."""


class Handler(BaseHTTPRequestHandler):
    """vLLM's answers, unless a fault is due."""

    protocol_version = "HTTP/1.1"
    server: "Fake"

    def do_GET(self):
        if self.path == "/v1/models":
            self.reply(200, {"data": self.server.cards})
        elif self.path == "/version" and self.server.version:
            self.reply(200, {"version": self.server.version})
        elif self.path == "/metrics" and self.server.metrics:
            self.reply(200, self.server.metrics.encode())
        elif self.path == "/health":
            self.reply(200, {})
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        assert self.path == "/v1/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("echo"):
            assert (body["logprobs"], body["max_tokens"]) == (1, 0)
        with self.server.lock:
            self.server.bodies.append(body)
            fault = self.server.faults.pop(0) if self.server.faults else None
            if fault == "always 500":
                self.server.faults.append(fault)
        if fault == "hang":
            self.server.released.wait(10)
            self.close_connection = True
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
            self.close_connection = True
        elif fault == "garbage":
            self.reply(200, b"<html>hello")
        elif isinstance(fault, int) or fault == "always 500":
            code = fault if isinstance(fault, int) else 500
            self.reply(code, {"error": {"message": "out of luck", "code": code}})
        elif isinstance(fault, str):
            self.reply(400, {"error": {"message": fault, "code": 400}})
        else:
            answer = self.server.answer(body)
            if callable(fault):
                answer = fault(answer)
            self.reply(200, answer)

    def reply(self, status, content):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model, tokenizer, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.tokenizer = model, tokenizer
        self.lock, self.released = threading.Lock(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reset()

    def reset(self):
        self.cards = [{"id": "demo", "max_model_len": MAX_LENGTH + 2}]
        self.version, self.metrics = None, None
        self.bodies, self.faults = [], []

    def start(self, seconds=1000.25, version="1.0", cache_dtype="auto"):
        """Report the start of a process, as vLLM does in its metrics."""
        self.version = version
        self.metrics = (
            "# HELP process_start_time_seconds Start time of the process since unix epoch.\n"
            f"process_start_time_seconds {seconds}\n"
            f'vllm:cache_config_info{{cache_dtype="{cache_dtype}",engine="0"}} 1.0\n'
            "vllm:num_requests_running 0.0\n"
        )

    def answer(self, body):
        prompts = body["prompt"]
        if not body.get("echo"):
            return self.written(body)
        if isinstance(prompts, str):
            prompts = [self.tokenizer.encode(prompts)]
        assert all(len(prompt) < self.cards[0]["max_model_len"] for prompt in prompts)
        choices = [
            {"index": i, "text": "", "logprobs": self.logprobs(prompt)}
            for i, prompt in enumerate(prompts)
        ]
        return {"model": body["model"], "choices": choices[::-1]}

    @torch.no_grad()
    def written(self, body):
        """A greedy answer that ends before the first stop text."""
        ids, new = list(body["prompt"]), []
        text, why = "", "length"
        while len(new) < body["max_tokens"]:
            with self.lock:
                new.append(int(self.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            stops = [text.index(stop) for stop in body["stop"] if stop in text]
            if stops or new[-1] == self.tokenizer.eos_token_id:
                text, why = text[: min(stops, default=None)], "stop"
                break
        choice = {"index": 0, "text": text, "finish_reason": why}
        usage = {"completion_tokens": len(new)}
        return {"model": body["model"], "choices": [choice], "usage": usage}

    @torch.no_grad()
    def logprobs(self, ids):
        with self.lock:
            table = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        own = [table[i, token].item() for i, token in enumerate(ids[1:])]
        top = [(int(row.argmax()), row.max().item()) for row in table[:-1]]
        return {
            "tokens": [f"token_id:{i}" for i in ids],
            "token_logprobs": [None, *own],
            "top_logprobs": [None]
            + [
                {f"token_id:{i}": a, f"token_id:{j}": b}
                for i, a, (j, b) in zip(ids[1:], own, top, strict=True)
            ],
        }


def serve(fake):
    """Let it answer in a thread, until it is shut down."""
    threading.Thread(target=fake.serve_forever, args=(0.05,), daemon=True).start()


def end(fake):
    fake.released.set()
    fake.shutdown()
    fake.server_close()
