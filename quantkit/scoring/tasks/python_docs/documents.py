"""The documents of the lm-eval task `python_docs`, and how its results are counted."""

import re
from typing import Any


def load(**_: Any) -> dict[str, Any]:
    """The held-out documents as lm-eval expects them."""
    from datasets import Dataset

    from quantkit.calibration.reading import python_text

    rows = [{"name": d.name, "text": d.text} for d in python_text.heldout()]
    return {"test": Dataset.from_list(rows)}


def process_results(doc: dict[str, Any], results: tuple[float]) -> dict[str, tuple[float, int]]:
    """Log-likelihood with the units that lm-eval divides it by."""
    (loglikelihood,) = results
    n_words = len(re.split(r"\s+", doc["text"]))
    n_bytes = len(doc["text"].encode())
    return {
        "word_perplexity": (loglikelihood, n_words),
        "byte_perplexity": (loglikelihood, n_bytes),
        "bits_per_byte": (loglikelihood, n_bytes),
    }
