"""Log-probabilities of token ids from an OpenAI-compatible completions server, such as vLLM.

Prompts go out as token ids, several a request and many requests at a time, with `echo`, so that
the server gives back a log-probability for every token but the first. What vLLM 0.32 does with it:

- `max_tokens: 0` is accepted together with `echo`; it generates one token all the same and leaves
  it out of the answer. Hence a prompt must be shorter than `max_model_len`.
- `logprobs: 1` gives the token's own log-probability and that of the likeliest token.
- `return_tokens_as_token_ids` names tokens by their ids, so that they can be compared.
- It does not read its prefix cache for such prompts. Minus infinity comes as -9999; NaN does not
  come at all, the whole request is answered with 400.
"""

import json
import math
import random
import re
import resource
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from quantkit.engine.http import MOST_BYTES, Connection, TooLong, Unreachable, without_password
from quantkit.errors import ScoreError
from quantkit.parsing import parse_json
from quantkit.scoring.rules import Rules

REQUEST_TOKENS = 4096  # short prompts share a request up to here
ATTEMPTS = 5
BACKOFF_S = 0.5  # then 1, 2 and 4, each give or take a half
TOKEN_BYTES = 1024
"""Bytes of an answer per token of a request: far more than names and two numbers take."""
NAN = "not JSON compliant"  # vLLM's message for log-probabilities that are NaN
WRITTEN_AT_ONCE = 128  # answers; engines batch concurrent requests
WRITTEN_BY_VLLM = 1024  # as many as it has under way at once by default on a large GPU
OTHER_FILES = 256  # that a process may have open besides its connections
T = TypeVar("T")
ABOVE_ZERO = 1e-3  # more than rounding can do to the logarithm of a probability


@dataclass(frozen=True)
class Echo:
    """A server's answer to a prompt: its tokens, and log-probabilities of all but the first."""

    tokens: list[str]
    own: list[float]
    best: list[float]
    """Of the likeliest token at the same position."""

    def tail(self, n_tokens: int) -> tuple[float, bool]:
        """Log-probability of the last tokens, and whether each was the likeliest."""
        own, best = self.own[-n_tokens:], self.best[-n_tokens:]
        return math.fsum(own), all(a >= b for a, b in zip(own, best, strict=True))

    def is_of(self, ids: list[int]) -> bool:
        """Whether it has these tokens; servers that do not report ids are judged by the number."""
        if all(token.startswith("token_id:") for token in self.tokens):
            return self.tokens == [f"token_id:{number}" for number in ids]
        return len(self.tokens) == len(ids)


class Endpoint:
    """One model on one server. The constructor asks the server what it serves."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        concurrent: int = 16,
        timeout_s: float = 300.0,
        api_key: str | None = None,
    ) -> None:
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError:  # an unmatched bracket, or a port that is not a number
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ScoreError(
                f"'{without_password(url)}' is not a server address; give http://HOST:PORT"
            )
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._auth = None
        if parts.username is not None and not api_key:
            self._auth = (unquote(parts.username), unquote(parts.password or ""))
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._root = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        self.url = f"{self._root}/v1"
        """Without a password, so that it can be shown."""
        self._concurrent = concurrent
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._stopped = threading.Event()
        card = self._choose(model)
        self.model = str(card["id"])
        self.root = str(card.get("root") or "")
        """What the server loaded: a folder on its machine, or a hub id."""
        self.max_model_len: int | None = card.get("max_model_len")
        if self.max_model_len is not None and (
            type(self.max_model_len) is not int or self.max_model_len < 1
        ):
            raise ScoreError(
                f"{self.url}/models gives max_model_len {str(self.max_model_len)[:40]!r}, which is "
                "not a number of tokens"
            )

    def version(self) -> str | None:
        """The version that vLLM reports next to its OpenAI routes; None for others."""
        with suppress(ValueError, KeyError, TypeError):
            return str(parse_json(self._beside("/version") or "")["version"])
        return None

    def facts(self) -> dict[str, str] | None:
        """What determines its answers: which engine, of which model, with which flags, since when.

        None where the start of its process is unknown, since the same address may then be another
        engine tomorrow. `created` in /v1/models is not that start: vLLM fills in the time of the
        request. `process_start_time_seconds` in /metrics is.
        """
        metrics = self._beside("/metrics") or ""
        started = re.search(r"^process_start_time_seconds (\S+)", metrics, re.MULTILINE)
        if started is None:
            return None
        flags = sorted(re.findall(r"^\S+_config_info\{(.*)\}", metrics, re.MULTILINE))
        with suppress(ValueError, KeyError, TypeError):  # only in vLLM's development mode
            flags.append(str(parse_json(self._beside("/server_info") or "")["vllm_config"]))
        return {
            "url": self.url,
            "model": self.model,
            "root": self.root,
            "max_model_len": str(self.max_model_len),
            "version": self.version() or "unknown",
            "started": started[1],
            "flags": "\n".join(flags),
        }

    def _beside(self, path: str) -> str | None:
        """The text of a page outside the OpenAI routes; None where there is no such page."""
        try:
            status, content = self._exchange("GET", f"{self._root}{path}", None)
        except (OSError, TooLong):
            return None
        finally:
            self._hang_up()
        return content.decode(errors="replace") if status == 200 else None

    def _choose(self, model: str | None) -> dict[str, Any]:
        listing = self._send("GET", "/models")
        try:
            cards = {_text(card["id"]): dict(card) for card in listing["data"]}
        except (KeyError, TypeError, ValueError) as error:
            raise ScoreError(
                f"{self.url}/models lists no models; is it an OpenAI-compatible server?"
            ) from error
        finally:
            self._hang_up()
        self._served = set(cards)
        names = ", ".join(cards) or "nothing"
        if model is not None and model not in cards:
            raise ScoreError(f"{self.url} serves {names}, not {model}; serve it, or name another")
        if model is None and len(cards) != 1:
            raise ScoreError(f"{self.url} serves {names}; say which one by its name")
        return cards[model] if model is not None else next(iter(cards.values()))

    def echo_text(self, text: str) -> Echo:
        """A text as tokenised by the server."""
        try:
            return self._ask(text, 1)[0]
        finally:
            self._hang_up()

    def echo_all(
        self,
        prompts: Sequence[list[int]],
        n_scored: Sequence[int],
        keep: Callable[[int, Echo], None],
    ) -> None:
        """Ask for many prompts at a time; `keep` is called with the number of each and its answer.

        A server reports all tokens, so how many are scored makes no difference to it. `keep` is
        called in this thread, as answers arrive. After an error nothing new is asked, and pending
        answers are still kept; after an interrupt all connections are closed.
        """
        work = [
            partial(self._echo_some, {i: prompts[i] for i in numbers})
            for numbers in _shared(prompts)
        ]
        self._all(work, keep, self._concurrent)

    def write_all(
        self,
        prompts: Sequence[tuple[int, ...]],
        rules: Rules,
        keep: Callable[[int, str], None],
    ) -> None:
        """The same for generated texts, one prompt per request: the server batches them."""
        work = [partial(self._write, i, prompts[i], rules) for i in range(len(prompts))]
        most = WRITTEN_BY_VLLM if self.version() else WRITTEN_AT_ONCE
        self._all(work, keep, connections(min(most, max(1, len(work)))))

    def _all(
        self, work: "Sequence[Callable[[], dict[int, T]]]", keep: "Callable[[int, T], None]", n: int
    ) -> None:
        failure: ScoreError | None = None
        self._stopped.clear()
        pool = ThreadPoolExecutor(n)
        try:
            futures = [pool.submit(part) for part in work]
            for future in as_completed(futures):
                try:
                    answers = future.result()
                except ScoreError as error:
                    failure = failure or error
                else:
                    for i, answer in answers.items():
                        keep(i, answer)
        except BaseException:
            self._cut()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self._hang_up()
        if failure:
            raise failure

    def _write(self, number: int, prompt: tuple[int, ...], rules: Rules) -> dict[int, str]:
        if self._stopped.is_set():
            return {}
        try:
            return {number: self._written(number, prompt, rules)}
        except BaseException:
            self._stopped.set()
            raise

    def _written(self, number: int, prompt: tuple[int, ...], rules: Rules) -> str:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": rules.max_new,
            "temperature": rules.temperature,
            "stop": list(rules.stops),
        }
        if rules.temperature:
            body |= {"seed": rules.seed + number, "top_p": rules.top_p or 1.0}
            body |= {"top_k": rules.top_k} if rules.top_k else {}
        if rules.repetition_penalty != 1:
            body["repetition_penalty"] = rules.repetition_penalty
        most_bytes = MOST_BYTES + rules.max_new * TOKEN_BYTES
        answer = self._send("POST", "/completions", body, most_bytes)
        return written_text(answer, rules.max_new, self.url, "serve with a longer --max-model-len")

    def _echo_some(self, prompts: dict[int, list[int]]) -> dict[int, Echo]:
        if self._stopped.is_set():
            return {}
        try:
            return dict(zip(prompts, self._echo(list(prompts.values())), strict=True))
        except BaseException:
            self._stopped.set()
            raise

    def _echo(self, prompts: list[list[int]]) -> list[Echo]:
        echoes = self._ask(prompts, len(prompts))
        for prompt, echo in zip(prompts, echoes, strict=True):
            if not echo.is_of(prompt):
                raise ScoreError(
                    f"{self.url} was sent {len(prompt)} tokens and answered about "
                    f"{len(echo.tokens)}, or about others; it may have another tokenizer"
                )
        return echoes

    def _ask(self, prompt: str | list[list[int]], n_prompts: int) -> list[Echo]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
            "temperature": 0,
            "return_tokens_as_token_ids": True,
        }
        n_tokens = len(prompt) if isinstance(prompt, str) else sum(map(len, prompt))
        most_bytes = MOST_BYTES + n_tokens * TOKEN_BYTES
        answer = self._send("POST", "/completions", body, most_bytes)
        try:
            if answer["model"] not in self._served:
                raise ScoreError(
                    f"{self.url} was asked for {self.model} and answered as {answer['model']}; "
                    "has the server changed?"
                )
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            found = [choice.get("logprobs") for choice in choices]
        except (KeyError, TypeError, AttributeError) as error:
            raise ScoreError(f"{self.url}/completions answered in an unknown form") from error
        if len(found) != n_prompts:
            raise ScoreError(f"{self.url} was sent {n_prompts} prompts and answered {len(found)}")
        return [self._read(logprobs) for logprobs in found]

    def _read(self, logprobs: Any) -> Echo:
        try:
            tokens = [_text(token) for token in logprobs["tokens"]]
            own = [_number(value) for value in logprobs["token_logprobs"][1:]]
            top = [max(map(_number, d.values())) for d in logprobs["top_logprobs"][1:]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScoreError(
                f"{self.url} gives no log-probabilities of prompts; a server is needed that "
                "answers `echo` with `logprobs`, as vLLM does"
            ) from error
        if not len(tokens) == len(own) + 1 == len(top) + 1:
            raise ScoreError(
                f"{self.url} answered {len(own) + 1} log-probabilities for {len(tokens)} tokens"
            )
        for value in own + top:
            if not (math.isfinite(value) and value <= ABOVE_ZERO):
                raise ScoreError(
                    f"{self.url} gives {value} as a log-probability; the model's outputs are not "
                    "finite, or the server is set to give logits (vLLM's --logprobs-mode)"
                )
        return Echo(tokens, own, top)

    def _send(self, method: str, path: str, body: Any = None, most_bytes: int = MOST_BYTES) -> Any:
        """One request, retried if the server is busy or gone, and its answer as data."""
        where, problem, tried = f"{self.url}{path}", "", 0
        while tried < ATTEMPTS:
            pause = BACKOFF_S * 2 ** (tried - 1) * random.uniform(0.5, 1.5)
            if tried and self._stopped.wait(pause):
                break
            tried += 1
            try:
                status, content = self._exchange(method, where, body, most_bytes)
            except TimeoutError as error:
                raise ScoreError(
                    f"{where} gave no answer within {self._timeout_s:g} s; check whether the "
                    "server is stuck, or lower its load"
                ) from error
            except TooLong as error:
                raise ScoreError(f"{where} {error}; it is not a model server") from error
            except Unreachable as error:
                problem = f"cannot be reached ({error})"
                continue
            if 200 <= status < 300:
                return _data(where, content)
            problem = f"answered {status}: {_reason(content)}"
            if NAN in problem:
                raise ScoreError(f"{where} {problem}; the model's outputs are not finite")
            if status != 429 and status < 500:
                raise ScoreError(f"{where} {problem}")
        raise ScoreError(f"{where} {problem}, {tried} times; see the server's log, then run again")

    def _exchange(
        self, method: str, url: str, body: Any, most_bytes: int = MOST_BYTES
    ) -> tuple[int, bytes]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = Connection(self._timeout_s, self._context, self._auth)
            self._open.add(connection)
        try:
            answer = connection.request(method, url, body, self._headers, most_bytes)
        except BaseException:
            self._open.discard(connection)
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def _hang_up(self) -> None:
        """Servers close idle connections within seconds, so none is kept between calls."""
        for connection in self._idle:
            connection.close()
        self._open.difference_update(self._idle)
        self._idle.clear()

    def _cut(self) -> None:
        """Make threads that wait for an answer give up at once."""
        self._stopped.set()
        for connection in list(self._open):
            connection.cut()


def connections(wanted: int) -> int:
    """How many of the connections wanted this process may open: each is a file, of which the usual
    limit is 1,024, but which a process may raise by itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return max(1, min(wanted, soft - OTHER_FILES))


def written_text(answer: Any, max_new: int, engine: str, if_short: str) -> str:
    """The text of an answer to one prompt, refused where it is not whole."""
    try:
        (choice,) = answer["choices"]
        text, why = _text(choice["text"]), _text(choice["finish_reason"])
        n_tokens = answer["usage"]["completion_tokens"] if why == "length" else max_new
    except (KeyError, TypeError, ValueError) as error:
        raise ScoreError(
            f"{engine} answered in an unknown form; its earlier answers are kept: run again"
        ) from error
    if why not in ("stop", "length"):
        raise ScoreError(f"{engine} broke off an answer ({why[:40]}); run again")
    if n_tokens != max_new:
        raise ScoreError(
            f"{engine} ended an answer for its length after {str(n_tokens)[:20]} tokens of "
            f"{max_new}; {if_short}"
        )
    return text


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.40} is not a number")
    return float(value)


def _shared(prompts: Sequence[list[int]]) -> Iterator[list[int]]:
    """Numbers of prompts that share a request."""
    numbers: list[int] = []
    n_tokens = 0
    for i, prompt in enumerate(prompts):
        if numbers and n_tokens + len(prompt) > REQUEST_TOKENS:
            yield numbers
            numbers, n_tokens = [], 0
        numbers.append(i)
        n_tokens += len(prompt)
    if numbers:
        yield numbers


def _data(where: str, content: bytes) -> Any:
    try:
        return parse_json(content, finite=False)
    except json.JSONDecodeError as error:
        raise ScoreError(f"{where} did not answer with JSON: {_reason(content)}") from error
    except ValueError as error:
        raise ScoreError(f"{where} answered JSON that cannot be read: {error}") from error


def _reason(content: bytes) -> str:
    """The server's own message: vLLM's, FastAPI's, or the beginning of whatever it sent."""
    text = content.decode(errors="replace").strip()
    with suppress(ValueError, AttributeError):
        data = parse_json(text)
        error = data.get("error", data)
        text = str(error.get("message") or error.get("detail") or text)
    return " ".join(text[:300].split()) or "nothing"
