"""Rows as tokens, the way a serving engine would see them.

Chats go through the model's own template, which writes special tokens itself; text gets those the
tokenizer puts around text. Either way they appear once. What is longer than a sample is cut at a
random place: text into windows, chats before a user turn, so that the template stays valid.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.calibration import images as pictures_of
from quantkit.calibration.images import Picture, Unusable, Vision
from quantkit.calibration.reading.messages import parsed
from quantkit.calibration.reading.record import SKIP
from quantkit.calibration.reading.row import Message, Row, content
from quantkit.calibration.template import Template, TemplateFault
from quantkit.errors import DataError

MAX_WINDOWS = 16
"""Most windows per row, so that no single document fills a set."""
CHARACTERS_PER_TOKEN = 8
"""More than any tokenizer needs on average; longer texts are cut before they are encoded."""
LONG = 4
"""Chats longer than this multiple of a sample's characters are measured without encoding them."""
SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


@dataclass(frozen=True)
class Piece:
    """Tokens of a row or a part of it; never longer than a sample."""

    ids: np.ndarray
    cut: bool
    """Whether part of its row is missing."""
    divisible: bool = False
    """Whether it may begin anywhere, as text may and a chat may not."""
    pictures: tuple[Picture, ...] = ()
    """Images that its tokens stand for; such a piece is never cut."""


class TooLong(DataError):
    """A chat that does not fit into a sample with its images."""


class Refused(DataError):
    """The template refuses a row."""


class Renderer:
    """Turns rows into pieces for one tokenizer and one sample length."""

    def __init__(self, tokenizer: Any, length: int, chat: str = "template") -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer)
        self.length = length
        self._plain = chat == "plain"
        self.vision: Vision | None = None
        """The model's processor, if chats have images that it may use."""
        self._ahead: dict[str, list[int]] = {}

    @cached_property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def check(self, row: Row) -> None:
        """Refuse chats for a model without a template, before any data is read."""
        if row.kind == "chat" and not self._plain and not self.has_template:
            raise DataError(
                f"{row.place} is a chat and this model's tokenizer has no chat template; "
                "use a model that has one, or `chat: plain` in the set's file"
            )

    def encode_ahead(self, rows: Sequence[Row]) -> None:
        """Encode the texts of some rows at once, on all cores; `pieces` finds them."""
        if not getattr(self._tokenizer, "is_fast", False):
            return
        texts = [
            row.text
            for row in rows
            if row.kind == "text"
            and len(row.text) <= MAX_WINDOWS * CHARACTERS_PER_TOKEN * self._room
        ]
        if texts:
            encoded = self._tokenizer(texts, add_special_tokens=False, verbose=False)
            self._ahead = dict(zip(texts, encoded["input_ids"], strict=True))

    def pieces(self, row: Row, rng: random.Random, folder: Path = Path()) -> list[Piece]:
        """The row's tokens in one or more pieces; its images are in `folder`."""
        self.check(row)
        if row.has_images:
            if self.vision is not None and self.has_template and not self._plain:
                return [self._pictured(row, self.vision, folder)]
            row = row.without_images
            if not row.plain.strip():
                return []
        if row.kind == "text":
            return self._windows(row.text, rng)
        if self.has_template and not self._plain:
            piece = self._chat(row, rng)
            return [piece] if len(piece.ids) else []
        if row.kind == "instruction":
            return self._windows(row.plain, rng)
        turns = [f"{SPEAKERS.get(m['role'], m['role'])}: {content(m)}" for m in row.messages]
        return self._windows("\n\n".join(turns), rng)

    def _pictured(self, row: Row, vision: Vision, folder: Path) -> Piece:
        """A chat with its images, which precede the text of their message, as in vLLM."""
        named = [one for message in row.messages for one in message.get("images", ())]
        try:
            pictures = [pictures_of.read(reference, folder) for reference in named]
        except Unusable as error:
            raise Unusable(f"{row.place}: {error}; {SKIP}") from error
        messages = [_with_parts(_with_objects(message)) for message in row.messages]
        is_open = messages[-1]["role"] != "assistant"
        try:
            text = Template(vision.processor).render(messages, row.tools, is_open)
            ids = vision.ids(text, pictures)
        except (TemplateFault, ValueError, TypeError, KeyError, IndexError) as error:
            raise Refused(
                f"{row.place}: the model's processor refuses it ({str(error)[:160]}); change the "
                f"row, or {SKIP}"
            ) from error
        if len(ids) > self.length:
            raise TooLong(
                f"{row.place} has {len(ids):,} tokens with its images, a sample {self.length:,}"
            )
        return Piece(np.asarray(ids, dtype=np.int32), False, False, tuple(pictures))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer puts before and after a text."""
        bare = self._encode("a", special=False)
        whole = self._encode("a", special=True)
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
        # A tokenizer that encodes text differently beside special tokens is used without them.
        return ([], []) if at is None else (whole[:at], whole[at + len(bare) :])

    @property
    def _room(self) -> int:
        """Tokens of a sample, without those that the tokenizer puts around a text."""
        before, after = self._around
        return max(1, self.length - len(before) - len(after))

    def _encode(self, text: str, special: bool) -> list[int]:
        if not special and text in self._ahead:
            return self._ahead[text]
        encoded = self._tokenizer(text, add_special_tokens=special, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _windows(self, text: str, rng: random.Random) -> list[Piece]:
        """A whole text, or windows with random edges."""
        (before, after), room = self._around, self._room
        excerpts = _excerpts(text, room * CHARACTERS_PER_TOKEN, rng)
        pieces = []
        for excerpt, is_last in excerpts:
            ids = self._encode(excerpt, special=False)
            if not ids:
                continue
            if len(excerpts) == 1 and len(ids) <= room:
                return [self._piece([*before, *ids, *after], False, True)]
            first = rng.randrange(min(room, len(ids))) if len(ids) > room else 0
            edges = sorted({0, *range(first, len(ids), room), len(ids)})
            for start, stop in pairwise(edges):
                end = after if is_last and stop == len(ids) else []
                pieces.append(self._piece([*before, *ids[start:stop], *end], True, True))
        if len(pieces) > MAX_WINDOWS:
            pieces = [pieces[i] for i in sorted(rng.sample(range(len(pieces)), MAX_WINDOWS))]
        return pieces

    def _piece(self, ids: Sequence[int], cut: bool, divisible: bool = False) -> Piece:
        return Piece(np.asarray(ids[: self.length], dtype=np.int32), cut, divisible)

    def _chat(self, row: Row, rng: random.Random) -> Piece:
        """A chat through the template; a long one begins at a random turn and is cut at the end."""
        # Bounded in characters, so that a row of megabytes costs nothing.
        limit = self.length * CHARACTERS_PER_TOKEN
        messages = [_shorten(_bounded(m, limit), limit, rng) for m in row.messages]
        cut = any(m is not old for m, old in zip(messages, row.messages, strict=True))
        if _characters(messages) <= LONG * limit:
            ids = self.template(messages, row)
            if len(ids) <= self.length:
                return self._piece(ids, cut)
        messages = self._with_short_opening(self._from_some_turn(messages, rng), rng)
        return self._piece(self.template(messages, row), True)

    def template(self, messages: Sequence[Message], row: Row) -> list[int]:
        """The tokens of a chat; if it ends with the user, the assistant's turn is opened."""
        try:
            return self._apply([_with_objects(m) for m in messages], row)
        except TemplateFault as error:
            if any("tool_calls" in m for m in messages):
                # A few templates, such as DeepSeek's, need arguments as the original text.
                with suppress(TemplateFault):
                    return self._apply(messages, row)
            roles = ", ".join(str(m.get("role")) for m in messages[:6])
            raise Refused(
                f"{row.place}: the model's chat template refuses it ({error}); its "
                f"roles are {roles}; change the row, or {SKIP}"
            ) from error

    def _apply(self, messages: Sequence[Message], row: Row) -> list[int]:
        is_open = messages[-1]["role"] != "assistant"
        return self._encode(self._template.render(messages, row.tools, is_open), special=False)

    def _from_some_turn(self, messages: list[Message], rng: random.Random) -> list[Message]:
        """The chat from a random user turn on, if enough is left to fill a sample."""
        n_system = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0)
        turns = messages[n_system:]
        is_long = _characters(turns) > LONG * self.length * CHARACTERS_PER_TOKEN
        if is_long:
            sizes = [_characters([m]) / CHARACTERS_PER_TOKEN for m in turns]
        else:
            sizes = [len(self._encode(content(m), special=False)) for m in turns]
        left = np.cumsum(sizes[::-1])[::-1]
        starts = [i for i, m in enumerate(turns) if m["role"] == "user"]
        enough = [i for i in starts if left[i] >= self.length]
        start = rng.choice(enough) if enough else (starts or [0])[0]
        stop = len(turns)
        if is_long:  # the rest is far beyond the end of the sample
            stop = int(np.searchsorted(-left, LONG * self.length - left[start])) + 1
        return [*messages[:n_system], *turns[start:stop]]

    def _with_short_opening(self, messages: Sequence[Message], rng: random.Random) -> list[Message]:
        """The opening turns shortened, if they would leave no room for an answer."""
        made = list(messages)
        for at in range(_first_user(messages) + 1):
            text = content(made[at])
            n_tokens = len(self._encode(text, special=False))
            if n_tokens > self.length // 2:
                parts = 4 if made[at]["role"] == "system" else 2
                keep = len(text) * self.length // (parts * n_tokens)
                made[at] = _shorten(made[at], max(1, keep), rng)
        return made


def _characters(messages: Sequence[Message]) -> int:
    """Their total length; even an empty turn counts something."""
    return sum(len(content(m)) + CHARACTERS_PER_TOKEN for m in messages)


def _with_parts(message: Message) -> Message:
    """A message in the form processors' templates take: images first, then the text."""
    kept = {key: value for key, value in message.items() if key != "images"}
    images = [{"type": "image"} for _ in message.get("images", ())]
    text = [{"type": "text", "text": plain}] if (plain := content(message)) else []
    return {**kept, "content": [*images, *text]}


def _with_objects(message: Message) -> Message:
    """A message as vLLM passes it to templates: arguments of calls are objects, not JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Message) -> Message:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    value = parsed(arguments) if arguments.strip() else {}
    return {**call, "function": {**function, "arguments": value}} if type(value) is dict else call


def _bounded(message: Message, limit: int) -> Message:
    """The same message with calls and reasoning cut to this length."""
    calls, reasoning = message.get("tool_calls") or [], message.get("reasoning_content") or ""
    if any(len(str(call)) > limit for call in calls):
        message = {**message, "tool_calls": _within([_with_object(c) for c in calls], limit)}
    if len(reasoning) > limit:
        message = {**message, "reasoning_content": reasoning[:limit]}
    return message


def _within(value: Any, limit: int) -> Any:
    if isinstance(value, dict):
        return {key: _within(held, limit) for key, held in value.items()}
    if isinstance(value, list):
        return [_within(held, limit) for held in value[:limit]]
    return value[:limit] if isinstance(value, str) else value


def _first_user(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)


def _shorten(message: Message, limit: int, rng: random.Random) -> Message:
    text = content(message)
    if len(text) <= limit:
        return message
    start = rng.randrange(len(text) - limit + 1)
    return {**message, "content": text[start : start + limit]}


def _excerpts(text: str, window: int, rng: random.Random) -> list[tuple[str, bool]]:
    """A whole text, or a few excerpts of one too long to encode in full.

    Each comes with whether it reaches the end of the text.
    """
    if len(text) <= MAX_WINDOWS * window:
        return [(text, True)]
    slots = rng.sample(range(len(text) // window), MAX_WINDOWS)
    stops = [(slot + 1) * window for slot in sorted(slots)]
    return [(text[stop - window : stop], stop == len(text)) for stop in stops]
