"""Files as streams of UTF-8 bytes: decompressed, and without a byte order mark."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from quantkit.errors import DataError

BUFFER_BYTES = 1 << 20
PACKED_BYTES = 1 << 16
"""Compressed bytes read at once; a small piece may expand to a thousand times its size."""
MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
PACKINGS = (".gz", ".zst")
# UTF-32's mark begins with that of UTF-16.
WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def unpacked(raw: BinaryIO, packing: str) -> io.BufferedReader:
    """A file's content; `packing` is its last extension, or empty."""
    if packing == ".gz":
        return io.BufferedReader(_Plain(gzip.GzipFile(fileobj=raw)), BUFFER_BYTES)
    if packing == ".zst":
        return io.BufferedReader(_Chunks(_unzstd(raw)), BUFFER_BYTES)
    return io.BufferedReader(_Plain(raw), BUFFER_BYTES)


def packing_of(stream: io.BufferedReader) -> str:
    """The compression of a stream without a name, detected by its first bytes."""
    head = stream.peek(4)
    return next((ending for magic, ending in MAGIC.items() if head.startswith(magic)), "")


def as_utf8(stream: io.BufferedReader) -> io.BufferedReader:
    """Drop the byte order mark, and recode UTF-16 and UTF-32."""
    head = stream.peek(4)[:4]
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    for mark, encoding in WIDE_MARKS.items():
        if head.startswith(mark):
            return io.BufferedReader(_Chunks(_recoded(stream, encoding)), BUFFER_BYTES)
    return stream


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Explain in one sentence why a file cannot be read to its end."""
    try:
        yield
    except EOFError as error:
        raise DataError(
            f"{path} is truncated: its compressed data ends in the middle; copy it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or not a gzip file: {error}; copy it again") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} begins like {error.encoding.upper()} but is not: {error.reason}; "
            "save it as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


class _Plain(io.RawIOBase):
    """Another stream, which stays open when this one is garbage-collected."""

    def __init__(self, stream: Any) -> None:
        # The first reads once, the second blocks until the buffer is full.
        self._fill = getattr(stream, "readinto1", None) or stream.readinto

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._fill(buffer)


class _Chunks(io.RawIOBase):
    """A stream of chunks that are produced on the fly."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _unzstd(raw: BinaryIO) -> Iterator[bytes]:
    # The package's own stream reader ends silently at the end of a truncated file.
    import zstandard

    maker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    try:
        while packed := raw.read(PACKED_BYTES):
            while packed:
                frame = frame or maker.decompressobj()
                yield frame.decompress(packed)
                packed = b""
                if frame.eof:
                    packed, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise OSError(f"its Zstandard data is damaged ({error}); copy it again") from error
    if frame is not None:
        raise EOFError


def _recoded(stream: io.BufferedReader, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    while raw := stream.read(PACKED_BYTES):
        yield decoder.decode(raw).encode()
    yield decoder.decode(b"", final=True).encode()
