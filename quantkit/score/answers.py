"""What a model answered to every question and on every document, so that models can be paired."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import ScoreError

if TYPE_CHECKING:
    import torch

LOSS = "loss"
"""The metric of a text that was scored whole: its negative log-likelihood."""


@dataclass(frozen=True)
class Text:
    """What was found on the texts of one task."""

    losses: list[float]
    """Negative log-likelihood of every document."""
    n_tokens: list[int]
    kl: "list[torch.Tensor] | None"
    """By document, for every token; None without a source to compare with."""
    agrees: "list[torch.Tensor] | None"


@dataclass(frozen=True)
class Outcome:
    """One figure for one document."""

    task: str
    doc_id: int
    doc_hash: str
    metric: str
    value: float
    """Of `acc` and the like 0 or 1; of `loss` the sum over the document's tokens."""
    weight: float
    """1, or the document's tokens."""
    chance: float = 0.0
    """How often a guess is right, where answers were to be chosen from."""


def of_samples(samples: dict[str, list[dict[str, Any]]], texts: dict[str, Text]) -> list[Outcome]:
    """From what lm-eval logs of every document."""
    found = []
    for task, logged in samples.items():
        for place, sample in enumerate(logged):
            who = (task, int(sample["doc_id"]), str(sample["doc_hash"]))
            if task in texts:
                text = texts[task]
                found.append(Outcome(*who, LOSS, text.losses[place], text.n_tokens[place]))
                continue
            chance = 1 / len(sample["resps"]) if len(sample["resps"]) > 1 else 0.0
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, bool | int | float):
                    found.append(Outcome(*who, metric, float(value), 1.0, chance))
    return found


def write(path: Path, outcomes: list[Outcome]) -> None:
    """A Parquet file, which appears whole or not at all."""
    import pyarrow
    from pyarrow import parquet

    columns = {name: [getattr(o, name) for o in outcomes] for name in Outcome.__annotations__}
    scratch = path.with_name(f".{path.name}.partial")
    parquet.write_table(pyarrow.table(columns), scratch)
    scratch.replace(path)


def read(path: Path) -> list[Outcome]:
    """The outcomes of a Parquet file."""
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
        return [Outcome(**row) for row in rows]
    except (OSError, ArrowException, TypeError) as error:
        raise ScoreError(f"{path} holds no answers: {error}; score the model again") from error
