"""The questions of the lm-eval tasks `needle_1k`, `needle_4k` and `needle_16k`: a number in a text.

A sentence with a made-up number is placed in the running Python's documentation, which was held out
from training and calibration. At the end the model is asked for it. For every text length there are
the same questions with the sentence at ten depths; no hub is needed.
"""

import random
from typing import Any

N_DEPTHS = 10
N_EACH = 5
NAMES = ("Amara", "Bruno", "Chiara", "Deniz", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas")


def load(characters: int, **_: Any) -> dict[str, Any]:
    """The questions as lm-eval expects them."""
    from datasets import Dataset

    return {"test": Dataset.from_list(questions(characters))}


def questions(characters: int) -> list[dict[str, Any]]:
    """Texts of about this many characters, each with a number in it."""
    from quantkit.calibration.reading import python_text

    whole = "\n\n".join(document.text for document in python_text.heldout())
    draw = random.Random(characters)
    rows = []
    for place in range(N_DEPTHS * N_EACH):
        start = draw.randrange(max(1, len(whole) - characters))
        text = whole[start : start + characters]
        depth = place % N_DEPTHS
        # At the end of a line, so that no sentence is split.
        at = text.find("\n", depth * len(text) // N_DEPTHS)
        at = len(text) if at < 0 else at
        name, number = draw.choice(NAMES), draw.randrange(10_000, 100_000)
        needle = f"\nThe access code of {name} is {number}.\n"
        question = f"\n\nThe access code of {name}, as the text above says, is"
        rows.append(
            {
                "text": f"{text[:at]}{needle}{text[at:]}{question}",
                "answer": str(number),
                "depth": depth / N_DEPTHS,
            }
        )
    return rows
