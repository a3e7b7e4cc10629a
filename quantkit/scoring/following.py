"""How closely a model follows its source's own answers: without labels or a hub, on any prompts.

The source answers every prompt greedily. A candidate is then given prompt and answer, and compared
at every token: how often it would have written the same, where the first different token is, and
how far its predictions are from the source's over the whole vocabulary.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import DataError
from quantkit.scoring import judging
from quantkit.scoring.judging import Judge
from quantkit.scoring.suites import FOLLOWED

if TYPE_CHECKING:
    import torch

N_OWN = 80
"""With `OWN_TOKENS` each, as many tokens as a judgement needs."""
OWN_PROMPT_CHARACTERS = 240
OWN_TOKENS = 64
DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class Prompts:
    """What a model is asked, and the maximum length of its answers."""

    name: str
    rows: tuple[Any, ...]
    """Texts, or conversations that end with a user's turn."""
    max_new: int
    tools: tuple[Any, ...] = ()
    """By row, the tools that a model may call; empty where no row has any."""
    judges: tuple[Judge | None, ...] = ()
    """By row, how its answer is judged; empty where none is."""

    @property
    def hashes(self) -> list[str]:
        """One hash per prompt, of everything that determines its results."""
        beside = zip(self.rows, self._tools, self._judges, strict=True)
        asked = [
            row if not tools and judge is None else [row, tools, judge and judge.to_json()]
            for row, tools, judge in beside
        ]
        return [hashlib.sha256(json.dumps(one).encode()).hexdigest() for one in asked]

    @property
    def _tools(self) -> tuple[Any, ...]:
        return self.tools or ((),) * len(self.rows)

    @property
    def _judges(self) -> tuple[Judge | None, ...]:
        return self.judges or (None,) * len(self.rows)

    def first(self, limit: int | None) -> "Prompts":
        return replace(
            self,
            rows=self.rows[:limit],
            tools=self.tools[:limit],
            judges=self.judges[:limit],
        )

    def encoded(self, tokenizer: Any) -> list[tuple[int, ...]]:
        """Their tokens; conversations go through the model's chat template."""
        texts = [row for row in self.rows if isinstance(row, str)]
        encoded = tokenizer(texts, return_attention_mask=False) if texts else {"input_ids": ()}
        found = iter(encoded["input_ids"])
        return [
            tuple(next(found) if isinstance(row, str) else self._conversation(row, more, tokenizer))
            for row, more in zip(self.rows, self._tools, strict=True)
        ]

    def _conversation(self, row: Any, tools: Any, tokenizer: Any) -> Sequence[int]:
        if getattr(tokenizer, "chat_template", None) is None:
            raise DataError(
                f"the prompts of {self.name} are conversations, and the model has no chat "
                "template; give texts, or a chat model"
            )
        more = {"tools": tools} if tools else {}
        made = tokenizer.apply_chat_template(
            row, add_generation_prompt=True, return_dict=True, **more
        )
        return list(made["input_ids"])

    def judged(self, answers: Sequence[str]) -> list[tuple[int, str, bool]]:
        """Indices of judged rows, the name of their judge's metric, and whether each is right."""
        return [
            (place, judge.metric, judge.is_right(answer))
            for place, (judge, answer) in enumerate(zip(self._judges, answers, strict=True))
            if judge is not None
        ]


def python_prompts() -> Prompts:
    """Prompts from the running Python's documentation, held out from training and calibration."""
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


def of_file(path: Path, max_new: int = DEFAULT_TOKENS, judge: str | None = None) -> Prompts:
    """Prompts from a team's own traffic: any file that calibration reads.

    A conversation's last answer is left out: the source gives its own. `judge` applies to all rows;
    without it rows use their own, if any.
    """
    from quantkit.calibration.reading import files
    from quantkit.calibration.reading.recognise import Recogniser
    from quantkit.calibration.reading.row import content

    if not path.is_file():
        raise DataError(f"--prompts {path}: there is no such file")
    rows: list[Any] = []
    tools: list[Any] = []
    judges: list[Judge | None] = []
    known = Recogniser(path.name)
    for record in files.read(path):
        row = known(record)
        messages = list(row.messages or ())
        reference: str | None = None
        while messages and messages[-1]["role"] == "assistant":
            reference = content(messages.pop())
        if not messages and not row.text.strip():
            continue
        rows.append(messages or row.text)
        tools.append(list(row.tools))
        judges.append(judging.of_row(record.place, record.value, row.tools, reference, judge))
    if not rows:
        raise DataError(f"{path} has no prompts: give lines of text, or JSON with messages")
    return Prompts(
        path.stem,
        tuple(rows),
        max_new,
        tuple(tools) if any(tools) else (),
        tuple(judges) if any(judges) else (),
    )


@dataclass(frozen=True)
class Followed:
    """By answer: how the model predicts its source's tokens."""

    lengths: list[int]
    agrees: "list[torch.Tensor] | None"

    def first_differences(self) -> list[int] | None:
        """Tokens before the first different one; None where not every token was compared."""
        if self.agrees is None or [len(part) for part in self.agrees] != self.lengths:
            return None
        return [
            int((~part).nonzero()[0]) if not bool(part.all()) else len(part) for part in self.agrees
        ]
