"""How far a model follows its source's own answers: no labels, no hub, anybody's prompts.

The source answers every prompt greedily. A candidate is then shown prompt and answer, and asked at
every token what it would have written: how often it is the same, where the first different token
stands, and how far its predictions are from the source's over the whole vocabulary.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import DataError
from quantkit.scoring.suites import FOLLOWED

if TYPE_CHECKING:
    import torch

N_OWN = 48
OWN_PROMPT_CHARACTERS = 240
OWN_TOKENS = 64
DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class Prompts:
    """What a model is asked, and how long its answers may get."""

    name: str
    rows: tuple[Any, ...]
    """Texts, or conversations that end with what a user says."""
    max_new: int

    @property
    def hashes(self) -> list[str]:
        """One for each prompt."""
        return [hashlib.sha256(json.dumps(row).encode()).hexdigest() for row in self.rows]

    def first(self, limit: int | None) -> "Prompts":
        return Prompts(self.name, self.rows[:limit], self.max_new)

    def encoded(self, tokenizer: Any) -> list[tuple[int, ...]]:
        """Their tokens; conversations go through the model's chat template."""
        return [tuple(_encoded(row, tokenizer, self.name)) for row in self.rows]


def own() -> Prompts:
    """From documentation of the running Python, held out from training and calibration."""
    from quantkit.calibration.reading import python_text

    found: list[str] = []
    documents = [document.text for document in python_text.heldout()]
    for number in range(N_OWN):
        for text in documents:
            start = number * 8 * OWN_PROMPT_CHARACTERS
            piece = text[start : start + OWN_PROMPT_CHARACTERS]
            if len(piece) == OWN_PROMPT_CHARACTERS and len(found) < N_OWN:
                # At the end of a word, where a prompt usually ends.
                found.append(piece.rsplit(maxsplit=1)[0])
    return Prompts(FOLLOWED, tuple(found), OWN_TOKENS)


def of_file(path: Path, max_new: int = DEFAULT_TOKENS) -> Prompts:
    """Prompts of a team's own traffic: any file that calibration reads.

    A conversation's last answer is left out: the source gives its own.
    """
    from quantkit.calibration.reading import files
    from quantkit.calibration.reading.recognise import Recogniser

    if not path.is_file():
        raise DataError(f"--prompts {path}: there is no such file")
    rows: list[Any] = []
    known = Recogniser(path.name)
    for row in map(known, files.read(path)):
        messages = list(row.messages or ())
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            rows.append(messages)
        elif row.text and row.text.strip():
            rows.append(row.text)
    if not rows:
        raise DataError(f"{path} holds no prompts: give lines of text, or JSON with messages")
    return Prompts(path.stem, tuple(rows), max_new)


def _encoded(row: Any, tokenizer: Any, name: str) -> Sequence[int]:
    if isinstance(row, str):
        ids: list[int] = tokenizer(row)["input_ids"]
        return ids
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"the prompts of {name} are conversations, and the model has no chat template; "
            "give texts, or a model that is made for chats"
        )
    made = tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=True)
    return list(made["input_ids"])


@dataclass(frozen=True)
class Followed:
    """By answer: what the model makes of its source's tokens."""

    lengths: list[int]
    agrees: "list[torch.Tensor] | None"

    def first_differences(self) -> list[int] | None:
        """Tokens before the first different one; None where not every token was compared."""
        if self.agrees is None or [len(part) for part in self.agrees] != self.lengths:
            return None
        return [
            int((~part).nonzero()[0]) if not bool(part.all()) else len(part) for part in self.agrees
        ]
