"""Bounded HTTP requests: every response has an overall deadline and a maximum size.

httpx limits the wait for each chunk of a response, so a server that sends one byte per second keeps
it waiting forever. Here a timer cuts the connection at the deadline, and a response over the
maximum size is not read to its end.
"""

import json
import re
import ssl
import threading
from contextlib import suppress
from socket import SHUT_RDWR
from typing import Any

import httpx

MOST_BYTES = 16 << 20
"""Maximum response size unless the caller allows more."""
SECRET = re.compile(r"//[^/?#\s]*@")


class Unreachable(ConnectionError):
    """The server does not answer, or not in HTTP."""


class TooLong(ValueError):
    """A response exceeds its maximum size."""


def without_password(url: str) -> str:
    """A URL for display, without user name and password."""
    return SECRET.sub("//", url)


class Connection:
    """A keep-alive connection to one server, used by one thread at a time."""

    def __init__(
        self, timeout_s: float, context: ssl.SSLContext | None = None, auth: Any = None
    ) -> None:
        self._timeout_s = timeout_s
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s),
            verify=False if context is None else context,
            auth=auth,
            trust_env=False,  # a proxy would distort measurements
            headers={"Accept-Encoding": "identity", "User-Agent": "quantkit"},
        )
        self._stream: Any = None
        self._expired = False

    def request(
        self,
        method: str,
        url: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> tuple[int, bytes]:
        """Status and body. Raises TimeoutError, Unreachable or TooLong."""
        self._expired = False
        timer = threading.Timer(self._timeout_s, self._expire)
        timer.daemon = True
        timer.start()
        try:
            return self._exchange(method, url, body, headers or {}, most_bytes)
        except httpx.TimeoutException as error:
            raise TimeoutError(str(error)) from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            if self._expired:
                raise TimeoutError("timed out") from error
            raise Unreachable(_reason(error)) from error
        finally:
            timer.cancel()

    def _exchange(
        self, method: str, url: str, body: Any, headers: dict[str, str], most_bytes: int
    ) -> tuple[int, bytes]:
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers = {"Content-Type": "application/json", **headers}
        extensions = {"trace": self._note}
        with self._client.stream(
            method, url, content=content, headers=headers, extensions=extensions
        ) as response:
            read = bytearray()
            for piece in response.iter_raw():
                read += piece
                if len(read) > most_bytes:
                    raise TooLong(f"answered more than {most_bytes >> 20} MiB")
                if self._expired:
                    raise TimeoutError("timed out")
            return response.status_code, bytes(read)

    def _note(self, event: str, info: dict[str, Any]) -> None:
        """Keep the socket, to cut it from outside; httpx's trace exposes it on connect."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]

    def _expire(self) -> None:
        self._expired = True
        self.cut()

    def cut(self) -> None:
        """Make the thread that waits for a response give up at once."""
        with suppress(OSError, AttributeError):  # not connected
            self._stream.get_extra_info("socket").shutdown(SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def ask(
    method: str,
    url: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 5.0,
) -> tuple[int, bytes]:
    """One request on a connection of its own, without TLS."""
    with Connection(timeout_s) as connection:
        return connection.request(method, url, body, headers)


def _reason(error: BaseException) -> str:
    """The system's error text if it refused, else the library's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
