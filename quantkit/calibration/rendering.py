"""Rows as tokens, the way a serving engine would see them.

Chats go through the model's own template, which writes special tokens itself; text gets those that
the tokenizer puts around text. Either way they are there once. What is longer than a sample is cut
at a random place: text into windows, chats before a turn of the user, so that the template holds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from quantkit.calibration.row import Message, Row, content
from quantkit.errors import DataError

MAX_WINDOWS = 16
"""Windows that one row may give, so that no single document fills a set."""
CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer needs on average; longer texts are cut before they are encoded."""
SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True)
class Piece:
    """Tokens of a row, or of a part of it; never more than a sample takes."""

    ids: np.ndarray
    cut: bool
    """Whether something of its row is missing."""


class Refused(DataError):
    """The template does not take a row."""


class Renderer:
    """Turns rows into pieces for one tokenizer and one length of samples."""

    def __init__(self, tokenizer: Any, length: int, chat: str = "template") -> None:
        self._tokenizer = tokenizer
        self.length = length
        self._plain = chat == "plain"

    @cached_property
    def has_template(self) -> bool:
        """Whether the model was made for chats."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def check(self, row: Row) -> None:
        """Refuse chats for a model that has no template, before anything is read for nothing."""
        if row.kind == "chat" and not self._plain and not self.has_template:
            raise DataError(
                f"{row.place} is a chat and this model's tokenizer has no chat template; "
                "use a model that has one, or `chat: plain` in the set's file"
            )

    def pieces(self, row: Row, rng: random.Random) -> list[Piece]:
        """The row in tokens, in one piece or in several."""
        self.check(row)
        if row.kind == "text":
            return self._windows(row.text, rng)
        if self.has_template and not self._plain:
            return [self._chat(row, rng)]
        if row.kind == "instruction":
            return self._windows(row.plain, rng)
        turns = [f"{SPEAKERS.get(m['role'], m['role'])}: {content(m)}" for m in row.messages]
        return self._windows("\n\n".join(turns), rng)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer puts before and after a text."""
        bare = self._encode("a", special=False)
        whole = self._encode("a", special=True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def _encode(self, text: str, special: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=special, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _windows(self, text: str, rng: random.Random) -> list[Piece]:
        """A text whole, or in windows whose edges lie at random places."""
        before, after = self._around
        room = max(1, self.length - len(before) - len(after))
        excerpts = _excerpts(text, room * CHARACTERS_PER_TOKEN, rng)
        pieces = []
        for excerpt in excerpts:
            ids = self._encode(excerpt, special=False)
            if not ids:
                continue
            if len(excerpts) == 1 and len(ids) <= room:
                return [Piece(_array([*before, *ids, *after]), False)]
            first = rng.randrange(min(room, len(ids))) if len(ids) > room else 0
            edges = sorted({0, *range(first, len(ids), room), len(ids)})
            for start, stop in pairwise(edges):
                end = after if stop == len(ids) else []
                part = ids[start:stop]
                pieces.append(Piece(_array([*before, *part, *end]), True))
        if len(pieces) > MAX_WINDOWS:
            pieces = [pieces[i] for i in sorted(rng.sample(range(len(pieces)), MAX_WINDOWS))]
        return pieces

    def _chat(self, row: Row, rng: random.Random) -> Piece:
        """A chat through the template; a long one begins at a random turn and ends in mid-air."""
        # Never more characters than could matter, so that a row of megabytes costs nothing.
        limit = self.length * CHARACTERS_PER_TOKEN
        messages = [_shorten(m, limit, rng) for m in row.messages]
        cut = any(m is not old for m, old in zip(messages, row.messages, strict=True))
        ids = self.template(messages, row)
        if len(ids) <= self.length:
            return Piece(_array(ids), cut)
        messages = self._from_some_turn(messages, rng)
        opening = self._encode(content(messages[_first_user(messages)]), special=False)
        if len(opening) > self.length // 2:
            # Otherwise a long first turn would leave no room for an answer.
            keep = int(len(content(messages[_first_user(messages)])) * self.length / 2)
            at = _first_user(messages)
            messages[at] = _shorten(messages[at], max(1, keep // len(opening)), rng)
        ids = self.template(messages, row)[: self.length]
        return Piece(_array(ids), True)

    def template(self, messages: Sequence[Message], row: Row) -> list[int]:
        """The tokens of a chat; one that ends with the user is open for the assistant's answer."""
        from jinja2.exceptions import TemplateError

        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(row.tools) or None,
                add_generation_prompt=messages[-1]["role"] != "assistant",
                tokenize=True,
                return_dict=False,
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages[:6])
            raise Refused(
                f"{row.place}: the model's chat template refuses it ({error or type(error)}); its "
                f"roles are {roles}; change the row, or use --skip-bad to go on without it"
            ) from error
        return ids

    def _from_some_turn(self, messages: list[Message], rng: random.Random) -> list[Message]:
        """The same chat from a random turn of the user on, if enough is left to fill a sample."""
        opening = [m for m in messages if m["role"] == "system"]
        turns = [m for m in messages if m["role"] != "system"]
        sizes = [len(self._encode(content(m), special=False)) for m in turns]
        starts = [i for i, m in enumerate(turns) if m["role"] == "user"]
        enough = [i for i in starts if sum(sizes[i:]) >= self.length]
        return [*opening, *turns[rng.choice(enough) if enough else (starts or [0])[0] :]]


def _first_user(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)


def _shorten(message: Message, limit: int, rng: random.Random) -> Message:
    said = content(message)
    if len(said) <= limit:
        return message
    start = rng.randrange(len(said) - limit + 1)
    return {**message, "content": said[start : start + limit]}


def _excerpts(text: str, window: int, rng: random.Random) -> list[str]:
    """A text whole, or some stretches of one so long that encoding all of it would be a waste."""
    if len(text) <= MAX_WINDOWS * window:
        return [text]
    slots = rng.sample(range(len(text) // window), MAX_WINDOWS)
    return [text[slot * window : (slot + 1) * window] for slot in sorted(slots)]


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)
