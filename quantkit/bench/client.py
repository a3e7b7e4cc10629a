"""Streams completions from an OpenAI-compatible server and records when each chunk arrives."""

import asyncio
import errno
from contextlib import suppress
from typing import Any

from quantkit.bench import request as kinds
from quantkit.bench.connection import Address, Cut, Response, get, send
from quantkit.bench.request import Answer, Failure, Request
from quantkit.errors import EngineError
from quantkit.parsing import parse_json

DONE = b"[DONE]"


class Client:
    """One model on one server."""

    def __init__(
        self,
        address: Address,
        model: str,
        timeout_s: float = 300.0,
        api_key: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.address = address
        self.model = model
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._extra = extra or {}

    async def ask(self, request: Request) -> Answer:
        """One completion; whatever goes wrong is part of the answer."""
        clock = asyncio.get_running_loop().time
        taking = _Taking(self.model, clock())
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                send(
                    self.address, "POST", "/v1/completions", self._body(request), self._api_key
                ) as response,
            ):
                await taking.take(response)
        except TimeoutError:
            taking.fail(kinds.TIMED_OUT, f"no full answer within {self._timeout_s:g} s")
        except Cut as error:
            taking.fail(kinds.CUT, str(error))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # our fault, not the server's
                raise EngineError(
                    "too many connections for this process; raise `ulimit -n`, or lower the load"
                ) from error
            broken = error.errno in (errno.ECONNRESET, errno.EPIPE)
            kind = kinds.CUT if broken else kinds.REFUSED
            taking.fail(kind, error.strerror or str(error) or type(error).__name__)
        return taking.answer(clock())

    def _body(self, request: Request) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.n_output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if request.exact else {}),
            **self._extra,
        }


class _Taking:
    """An answer in progress."""

    def __init__(self, model: str, sent: float) -> None:
        self._model = model
        self._sent = sent
        self._pieces: list[float] = []
        self._last: float | None = None
        """When it gave its finish reason, in a chunk without text."""
        self._counted: dict[str, Any] = {}
        self._finished = False
        self._failure: Failure | None = None

    def fail(self, kind: str, words: str) -> None:
        """Record a failure; only the first counts."""
        self._failure = self._failure or Failure(kind, words[:300])

    async def take(self, response: Response) -> None:
        clock = asyncio.get_running_loop().time
        if response.status != 200:
            self.fail(f"HTTP {response.status}", reason(await response.read()))
            return
        async for line in response.lines():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == DONE:
                self._finished = True
                break
            self._event(data, clock())
            if self._failure:
                return
        if not self._finished:
            self.fail(kinds.CUT, "the stream ended without its final event")

    def _event(self, data: bytes, now: float) -> None:
        try:
            event = parse_json(data)
            if "error" in event:
                self.fail(kinds.IN_STREAM, reason(data))
                return
            named = event.get("model", self._model)
            choices = event.get("choices") or ()
            if any(choice.get("text") or not choice.get("finish_reason") for choice in choices):
                self._pieces.append(now)
            elif choices:
                self._last = now
            self._counted = event.get("usage") or self._counted
        except (ValueError, TypeError, AttributeError):
            self.fail(kinds.NOT_AN_ANSWER, reason(data))
            return
        if named != self._model:
            self.fail(kinds.WRONG_MODEL, f"{named} answered instead of {self._model}")

    def answer(self, ended: float) -> Answer:
        """The finished answer."""
        reported = self._counted.get("completion_tokens")
        n_output = reported if isinstance(reported, int) else len(self._pieces)
        n_prompt = self._counted.get("prompt_tokens")
        # vLLM's last token may be half a character, which is not text. llama.cpp ends with one more
        # empty chunk.
        if self._last is not None and n_output > len(self._pieces):
            self._pieces.append(self._last)
        if not self._pieces:
            self.fail(kinds.EMPTY, "the server ended its answer before the first token")
        return Answer(
            self._sent,
            tuple(self._pieces),
            ended,
            n_output,
            n_prompt if isinstance(n_prompt, int) else None,
            self._failure,
        )


async def models(address: Address, api_key: str | None = None) -> list[dict[str, Any]]:
    """The models that a server lists."""
    try:
        status, content = await get(address, "/v1/models", api_key=api_key)
        if status != 200:
            raise EngineError(f"{address.url}/v1/models answered {status}: {reason(content)}")
        return [dict(card) for card in parse_json(content)["data"] if card["id"]]
    except (OSError, TimeoutError, Cut, UnicodeError) as error:  # Unicode: a bad host name
        why = getattr(error, "strerror", None) or str(error) or "no answer"
        raise EngineError(f"{address.url} cannot be reached ({why}); is the server up?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"{address.url}/v1/models lists no models; is it an OpenAI-compatible server?"
        ) from error


def reason(content: bytes) -> str:
    """The server's own message, or the beginning of whatever it sent."""
    text = content.decode(errors="replace").strip()
    with suppress(ValueError, AttributeError):
        data = parse_json(text)
        error = data.get("error", data)
        text = str(error if isinstance(error, str) else error.get("message") or text)
    return " ".join(text[:300].split()) or "nothing"
