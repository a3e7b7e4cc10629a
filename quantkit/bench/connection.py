"""Minimal HTTP over asyncio for benchmarks: one request per connection, lines as they arrive.

A full client library spends a good part of a millisecond on each token; at hundreds of streams that
would be attributed to the server. Connecting is part of a request's time.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quantkit.engine.http import without_password
from quantkit.errors import EngineError

LONGEST_LINE = 1 << 22


class Cut(Exception):
    """The peer closed the connection in the middle of a response."""


@dataclass(frozen=True)
class Address:
    """Address of a server."""

    url: str
    """Without a path."""
    host: str
    port: int
    secure: bool
    path: str
    """Prefix of every request path."""

    @classmethod
    def of(cls, url: str) -> "Address":
        """From a URL as typed, with or without a trailing /v1."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # an unmatched bracket, or a port that is not a number
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(
                f"'{without_password(url)}' is not a server address; give http://HOST:PORT"
            )
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        port = port or (443 if secure else 80)
        plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        return cls(plain, parts.hostname, port, secure, path)


@dataclass(frozen=True)
class Response:
    """A status, and a body that is read line by line."""

    status: int
    body: AsyncIterator[bytes]

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines as soon as they are complete."""
        rest = b""
        async for data in self.body:
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([data async for data in self.body])


@asynccontextmanager
async def send(
    address: Address, method: str, path: str, body: Any = None, api_key: str | None = None
) -> AsyncIterator[Response]:
    """Send a request; the connection is closed on exit, whatever was read by then."""
    context = ssl.create_default_context() if address.secure else None
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=context, limit=LONGEST_LINE
    )
    try:
        content = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{method} {address.path}{path} HTTP/1.1",
            f"Host: {address.host}:{address.port}",
            "Connection: close",
            f"Content-Length: {len(content)}",
            "Content-Type: application/json",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
        ]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + content)
        await writer.drain()
        status, headers = await _head(reader)
        yield Response(status, _body(reader, headers))
    finally:
        writer.transport.abort()  # a hanging server must not block us


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readline()).decode("latin-1").split(maxsplit=2)
    if len(first) < 2 or not first[1].isdecimal():
        raise Cut("it closed the connection instead of answering")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    return int(first[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Chunks as they arrive; a truncated body is an error."""
    try:
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int((await reader.readline()).split(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while data := await reader.read(1 << 16):
                yield data
    except (asyncio.IncompleteReadError, ValueError) as error:
        raise Cut("the connection ended in the middle of the answer") from error


async def get(
    address: Address, path: str, timeout_s: float = 10.0, api_key: str | None = None
) -> tuple[int, bytes]:
    """Status and body of a small response."""
    async with (
        asyncio.timeout(timeout_s),
        send(address, "GET", path, api_key=api_key) as response,
    ):
        return response.status, await response.read()
