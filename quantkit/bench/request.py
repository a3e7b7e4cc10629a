"""One request of a workload, its answer, and its times.

Times are those of the event loop's clock, in seconds. Latencies count from the moment a request was
due, not from when it was sent: a client that waits for a slow server must not hide the waiting.
"""

from dataclasses import dataclass
from itertools import pairwise

REFUSED = "connection refused"
CUT = "stream cut"
TIMED_OUT = "timed out"
WRONG_MODEL = "wrong model"
IN_STREAM = "error in the stream"
NOT_AN_ANSWER = "not an answer"
EMPTY = "no tokens"


@dataclass(frozen=True)
class Request:
    """A prompt, and how much to generate."""

    prompt: str | list[int]
    """Text, or token ids."""
    n_output: int
    """Tokens to generate."""
    exact: bool = True
    """Whether to generate all of them even if the model would stop earlier."""
    at: float | None = None
    """Seconds after the start, if a trace gives the time."""


@dataclass(frozen=True)
class Failure:
    """Why a request has no full answer."""

    kind: str
    words: str


@dataclass(frozen=True)
class Answer:
    """What a server sent."""

    sent: float
    pieces: tuple[float, ...]
    """Arrival times of the text chunks: one token each, or several with speculative decoding."""
    ended: float
    n_output: int = 0
    n_prompt: int | None = None
    """As the server counts; None if it does not report it."""
    failure: Failure | None = None


@dataclass(frozen=True)
class Outcome:
    """A request and its answer."""

    due: float
    answer: Answer
    n_asked: int
    exact: bool = True

    @property
    def ok(self) -> bool:
        return self.answer.failure is None

    @property
    def short(self) -> bool:
        """Whether the server stopped before the requested length although it was told not to."""
        return self.ok and self.exact and self.answer.n_output < self.n_asked

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.answer.pieces[0] - self.due

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is only one."""
        if self.answer.n_output < 2 or len(self.answer.pieces) < 2:
            return None
        first, last = self.answer.pieces[0], self.answer.pieces[-1]
        return (last - first) / (self.answer.n_output - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks: what a reader sees as stutter."""
        pieces = self.answer.pieces
        return [b - a for a, b in pairwise(pieces)]

    @property
    def e2e_s(self) -> float:
        """From due time to the last chunk."""
        return self.answer.pieces[-1] - self.due

    @property
    def lag_s(self) -> float:
        """How late this client was; large values mean that the client is the bottleneck."""
        return self.answer.sent - self.due
