"""A model's answers to every question and on every document, so that models can be paired."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import ScoreError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

LOSS = "loss"
"""The metric of a text that was scored whole: its negative log-likelihood."""


@dataclass(frozen=True)
class Text:
    """Results on the texts of one task."""

    losses: list[float]
    """Negative log-likelihood of every document's own tokens, without BOS and the like."""
    n_tokens: list[int]
    kl: "list[torch.Tensor] | None"
    """By document, for every compared token; None without a source to compare with."""
    agrees: "list[torch.Tensor] | None"


@dataclass(frozen=True)
class Outcome:
    """One value for one document."""

    task: str
    doc_id: int
    doc_hash: str
    metric: str
    value: float
    """0 or 1 for `acc` and the like; for `loss` the sum over the document's tokens."""
    weight: float
    """1, or the document's tokens."""
    chance: float = 0.0
    """How often a guess is right, for multiple choice."""


def of_samples(samples: dict[str, list[dict[str, Any]]], texts: dict[str, Text]) -> list[Outcome]:
    """From what lm-eval logs for every document."""
    found = []
    for task, logged in samples.items():
        # Some tasks read one answer in several ways, and log each; the first is the score.
        first = logged[0].get("filter") if logged else None
        for place, sample in enumerate(s for s in logged if s.get("filter") == first):
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


class Answers(Sequence[Outcome]):
    """Outcomes as columns, for thousands of them per candidate."""

    def __init__(self, columns: "Mapping[str, npt.NDArray[Any]]") -> None:
        self._columns = columns

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Answers":
        """The same in columns, unless it is already."""
        if isinstance(outcomes, Answers):
            return outcomes
        return cls(
            {
                name: _column([getattr(o, name) for o in outcomes])
                for name in Outcome.__annotations__
            }
        )

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        return Outcome(**{name: values[place].item() for name, values in self._columns.items()})

    def __len__(self) -> int:
        return len(self._columns["task"])

    def column(self, name: str) -> "npt.NDArray[Any]":
        """One field of all outcomes."""
        return self._columns[name]

    def of_metric(self, metric: str) -> "Answers":
        """Only those of one metric."""
        kept = self._columns["metric"] == metric
        return Answers({name: values[kept] for name, values in self._columns.items()})


def _column(values: Sequence[Any]) -> "npt.NDArray[Any]":
    import numpy as np

    return np.array(values) if len(values) else np.empty(0)


def _stored(column: Any) -> "npt.NDArray[Any]":
    """A column of a file; repeated words are read once."""
    import numpy as np
    import pyarrow

    if not pyarrow.types.is_string(column.type):
        return column.to_numpy()
    encoded = column.combine_chunks().dictionary_encode()
    words = encoded.dictionary.to_pylist()
    return np.array(words)[encoded.indices.to_numpy()] if words else np.empty(0)


def write(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write a Parquet file, atomically."""
    import pyarrow
    from pyarrow import parquet

    found = Answers.of(outcomes)
    columns = {name: found.column(name).tolist() for name in Outcome.__annotations__}
    scratch = path.with_name(f".{path.name}.partial")
    parquet.write_table(pyarrow.table(columns), scratch)
    scratch.replace(path)


def read(path: Path) -> Answers:
    """The outcomes of a Parquet file."""
    import numpy as np
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path)
        columns = {
            name: _stored(table[name])
            if name in table.column_names
            else _column([Outcome.chance] * len(table))
            for name in Outcome.__annotations__
            if name in table.column_names or name == "chance"  # old files have no chance
        }
    except (OSError, ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ScoreError(f"{path} has no answers: {error}; score the model again") from error
    if missing := [name for name in Outcome.__annotations__ if name not in columns]:
        raise ScoreError(f"{path} has no answers: it has no {missing[0]}; score the model again")
    for name in ("doc_id", "value", "weight", "chance"):
        if columns[name].dtype.kind not in "iufb" or not np.isfinite(columns[name]).all():
            raise ScoreError(f"{path}: {name} is not a number everywhere; score the model again")
    return Answers(columns)
