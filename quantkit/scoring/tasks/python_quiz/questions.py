"""The questions of the lm-eval task `python_quiz`: which words end this line?

A question is a line of a held-out document without its last words, below the line before it. The
choices are those words and the ends of three lines of other documents of the same kind: as many
words, nearly as many characters, in a seeded order. Without the question nothing distinguishes
them.
"""

import random
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from quantkit.calibration.reading import python_text
from quantkit.calibration.reading.python_text import Document

N_QUESTIONS = 400  # of some 600: the demo scores nine models with them
ENDING_WORDS = 4
BEGINNING_WORDS = 4  # at least
N_WRONG = 3
LENGTH_TOLERANCE = 2  # characters
SEED = 0
PUNCTUATION = ".,;:!?()'\"`*"


class Line(NamedTuple):
    """A line of prose in two parts."""

    document: Document
    beginning: str
    """With the line before it."""
    ending: str


def load(**_: Any) -> dict[str, Any]:
    """The questions as lm-eval expects them."""
    from datasets import Dataset

    return {"test": Dataset.from_list(questions())}


@cache
def questions() -> list[dict[str, Any]]:
    """Shuffled, so that the first few are as good a sample as any."""
    lines = _lines()
    generators = {line.document.name: _generator(line.document.name) for line in lines}
    found = []
    for line in lines:
        generator = generators[line.document.name]
        others = [other.ending for other in lines if _could_be_wrong(other, line)]
        if len(others) < N_WRONG:
            continue
        choices = generator.sample(others, N_WRONG)
        answer = generator.randrange(N_WRONG + 1)
        choices.insert(answer, line.ending)
        found.append(
            {
                "document": line.document.name,
                "question": line.beginning,
                "choices": choices,
                "answer": answer,
            }
        )
    _generator("order").shuffle(found)
    return found[:N_QUESTIONS]


def _generator(name: str) -> random.Random:
    """Seeded by text, which is the same for every process and Python."""
    return random.Random(f"{SEED}:{name}")


def _could_be_wrong(other: Line, line: Line) -> bool:
    return (
        other.document.kind == line.document.kind
        and other.document.name != line.document.name
        and abs(len(other.ending) - len(line.ending)) <= LENGTH_TOLERANCE
        and other.ending not in line.document.text
    )


def _lines() -> list[Line]:
    """Lines that can be asked about, with unique endings."""
    # Topics quote each other and docstrings get copied: what the training text contains is not
    # asked.
    seen = _plain(" ".join(document.text for document in python_text.train()))
    by_ending: dict[str, Line] = {}
    for document in python_text.heldout():
        for before, line in pairwise(document.text.splitlines()):
            beginning, *ending = line.rsplit(" ", ENDING_WORDS)
            if (
                before.strip()
                and len(beginning.split()) >= BEGINNING_WORDS
                and all(word.strip(PUNCTUATION).isalpha() for word in ending)
                and _plain(line) not in seen
            ):
                end = " ".join(ending)
                by_ending.setdefault(end.lower(), Line(document, f"{before}\n{beginning}", end))
    return list(by_ending.values())


def _plain(text: str) -> str:
    """As one line: the same text is wrapped and indented differently elsewhere."""
    return " ".join(text.split())
