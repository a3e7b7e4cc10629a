"""Prompts for engines: real text that every machine has, as token ids.

All have one length, so that our own forward passes need no padding, and no demo model was trained
on them. They come from the running Python; their digest is recorded.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quantkit.calibration.reading import python_text
from quantkit.errors import DataError

N_GENERATED = 8
GENERATED_FROM = 32
"""Tokens of a prompt that is continued ..."""
MAX_TOKENS = 24
"""... and of the continuation."""
N_SCORED = 64
SCORED_TOKENS = 96
"""Tokens of a prompt whose log-probabilities are compared."""


@dataclass(frozen=True)
class Prompts:
    """Token ids, each list of one length."""

    generate: list[list[int]]
    max_tokens: int
    score: list[list[int]]

    @property
    def digest(self) -> str:
        return hashlib.sha256(
            str((self.generate, self.max_tokens, self.score)).encode()
        ).hexdigest()

    @property
    def longest(self) -> int:
        """What an engine's context must hold; scoring generates one more token, which is
        dropped.
        """
        generated = max(map(len, self.generate)) + self.max_tokens
        return max(generated, max(map(len, self.score), default=0) + 1)


def make(tokenizer: Any, context: int, where: object, n_scored: int = N_SCORED) -> Prompts:
    """Prompts for a model, shorter where its context is small."""
    length = min(SCORED_TOKENS, context - 1)
    if length < GENERATED_FROM + MAX_TOKENS:
        raise DataError(
            f"{where} has a context of {context} tokens: too short for a prompt; "
            f"{GENERATED_FROM + MAX_TOKENS + 1} are needed"
        )
    found: list[list[int]] = []
    for ids in _windows(tokenizer, length):
        found.append(ids)
        if len(found) == n_scored:
            apart = max(1, n_scored // N_GENERATED)
            begun = [ids[:GENERATED_FROM] for ids in found[::apart]][:N_GENERATED]
            return Prompts(begun, MAX_TOKENS, found)
    raise DataError(f"{where}: its tokenizer makes only {len(found)} prompts from the texts here")


def _windows(tokenizer: Any, length: int) -> Iterator[list[int]]:
    """The beginnings of documents, then what follows them, each with the usual opening token."""
    opening = list(tokenizer("")["input_ids"])[:1]  # such as BOS
    documents = [list(tokenizer(d.text)["input_ids"]) for d in python_text.heldout()]
    step = length - len(opening)
    for number in range(max(map(len, documents), default=0) // step):
        for ids in documents:
            body = ids[len(opening) :] if ids[: len(opening)] == opening else ids
            piece = body[number * step : (number + 1) * step]
            if len(piece) == step:
                yield opening + piece
