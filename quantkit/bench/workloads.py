"""Workloads: prompts of fixed lengths, a trace of real traffic, or calibration data.

A trace is a file of JSON lines. Each has an arrival time (`at` or `timestamp` in seconds), a
`prompt` (text or token ids) or its length (`prompt_tokens`), and `output_tokens`. Lines with
`hash_ids` are in Mooncake's format: times in milliseconds, `input_length` and `output_length`, and
one id per 512 tokens, equal where prompts have a common prefix; so the prefix cache is hit as in
the original traffic.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from quantkit.bench.record import Workload
from quantkit.bench.request import Request
from quantkit.errors import DataError
from quantkit.parsing import parse_json

LOWEST, HIGHEST = 256, 2000
"""Token ids to draw from: every vocabulary has them, and none is an image or end token."""
HASH_BLOCK = 512


class Source(Protocol):
    """A source of requests."""

    @property
    def about(self) -> Workload:
        """Its description in the record."""

    def requests(self, n: int | None, seed: int) -> list[Request]:
        """Requests; another seed gives other ones if they are random."""


def _ids(draw: random.Random, n: int) -> list[int]:
    return [draw.randrange(LOWEST, HIGHEST) for _ in range(n)]


@dataclass(frozen=True)
class Fixed:
    """Random tokens, so the prefix cache helps only with what is shared on purpose."""

    prompt_tokens: int
    output_tokens: int
    shared_prefix: int = 0

    def __post_init__(self) -> None:
        if self.shared_prefix >= self.prompt_tokens:
            raise DataError(
                f"a shared prefix of {self.shared_prefix} tokens leaves nothing of prompts of "
                f"{self.prompt_tokens}; make it shorter"
            )

    @property
    def about(self) -> Workload:
        return Workload(
            name="fixed",
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            shared_prefix=self.shared_prefix,
        )

    def requests(self, n: int | None, seed: int) -> list[Request]:
        draw = random.Random(f"{seed} own")
        common = _ids(random.Random(f"{seed} shared"), self.shared_prefix)
        rest = self.prompt_tokens - self.shared_prefix
        return [Request(common + _ids(draw, rest), self.output_tokens) for _ in range(n or 1)]


@dataclass(frozen=True)
class Recorded:
    """Recorded requests, in order and starting over when they run out."""

    name: str
    trace: Sequence[Request]

    @property
    def about(self) -> Workload:
        outputs = {request.n_output for request in self.trace}
        prompts = {_length(request) for request in self.trace}
        return Workload(
            name=self.name,
            prompt_tokens=prompts.pop() if len(prompts) == 1 else None,
            output_tokens=outputs.pop() if len(outputs) == 1 else None,
        )

    @property
    def has_times(self) -> bool:
        return all(request.at is not None for request in self.trace)

    def requests(self, n: int | None, seed: int) -> list[Request]:
        n = n or len(self.trace)
        # A second round has no times in the trace.
        again = [replace(request, at=None) for request in self.trace]
        rounds = [*self.trace, *(again * (n // len(self.trace)))]
        return rounds[:n]


def _length(request: Request) -> int | None:
    return len(request.prompt) if isinstance(request.prompt, list) else None


def trace(path: Path, seed: int = 0) -> Recorded:
    """Traffic from a file; every line is validated before anything is sent."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a trace: it is not text in UTF-8") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_row(parse_json(line), random.Random(f"{seed} {number}"), seed))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise DataError(f"{path}:{number} is not a request: {_words(error)}") from error
    if not found:
        raise DataError(f"{path} has no requests")
    return Recorded(path.stem, found)


def _words(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)


def _row(row: dict[str, Any], draw: random.Random, seed: int) -> Request:
    n_output = _count(row, "output_tokens", "output_length", "max_tokens")
    at = row.get("at", row.get("timestamp"))
    at = None if at is None else float(at)
    if at is not None and not math.isfinite(at):
        raise ValueError(f"it comes at {at}, which is not a time")
    if "hash_ids" in row:
        prompt = _of_blocks(row["hash_ids"], _count(row, "input_length"), seed)
        return Request(prompt, n_output, at=None if at is None else at / 1000)
    asked = row.get("prompt")
    if isinstance(asked, list) and not all(isinstance(number, int) for number in asked):
        raise ValueError("prompt is neither text nor a list of token ids")
    if asked is None:
        asked = _ids(draw, _count(row, "prompt_tokens", "input_length"))
    elif not isinstance(asked, str | list) or not asked:
        raise ValueError("prompt is neither text nor a list of token ids")
    return Request(asked, n_output, at=at)


def _count(row: dict[str, Any], *names: str) -> int:
    for name in names:
        if name in row:
            if not isinstance(row[name], int) or row[name] < 1:
                raise ValueError(f"{name} is {row[name]!r}, not a number of tokens")
            return int(row[name])
    raise KeyError(names[0])


def _of_blocks(hashes: Sequence[int], n: int, seed: int) -> list[int]:
    ids: list[int] = []
    for number in hashes:
        ids += _ids(random.Random(f"{seed} block {number}"), HASH_BLOCK)
    if len(ids) < n:
        raise ValueError(f"hash_ids stand for {len(ids)} tokens, input_length is {n}")
    return ids[:n]


def of_tokens(name: str, samples: Sequence[Sequence[int]], output_tokens: int) -> Recorded:
    """Prompts of a calibration set; answers have a fixed length, so that runs compare."""
    return Recorded(name, [Request(list(sample), output_tokens) for sample in samples])
