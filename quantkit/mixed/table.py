"""The table of candidates: bytes and quality cost of each unit in each format.

One pass over calibration data makes it; budgets are then solved from it in seconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from quantkit.errors import DataError
from quantkit.parsing import parse_json
from quantkit.schemes import Strict
from quantkit.specs import as_record, json_problem
from quantkit.storage import write_text

FILE = "sensitivity.json"
VERSION = 4


class UnitRow(Strict):
    """One unit: tensors that are quantised together."""

    name: str
    modules: list[str]
    n_weights: int
    sizes: list[int | None]
    """Bytes in files, by format; None where the format does not fit."""
    errors: list[float | None]
    """Squared error of the unit's outputs per token, by format: tr(D G D^T) / n, with weights
    rounded to nearest with searched scales and inputs rounded as the format does; what GPTQ leaves
    of it where GPTQ rounds to the format in the end.
    """
    energy: float
    """Squared norm of the outputs themselves, per token."""
    probe_error: float = 0.0
    """The same for the change that the probe made ..."""
    probe_kl: float | None = None
    """... and what that does to the model's predictions: mean KL in nats per token, on a
    few samples with this unit changed alone. None: not measured.
    """

    @property
    def weight(self) -> float | None:
        """KL per squared error."""
        if self.probe_kl is None or not self.probe_error > 0:
            return None
        return self.probe_kl / self.probe_error


class Table(Strict):
    """All units of a model."""

    version: int = VERSION
    model: str
    source: str
    """The source's fingerprint."""
    engine: str
    """vllm or llama.cpp."""
    calibration: str
    calibration_digest: str
    n_tokens: int
    formats: list[str]
    probe: str
    """The format that the probe rounded each unit to."""
    n_probe_tokens: int
    other_bytes: int
    """Bytes of tensors outside all units: norms, and what always stays in 16 bits."""
    units: list[UnitRow]
    seconds: float = Field(0.0, ge=0)

    @property
    def is_weighted(self) -> bool:
        """Whether errors are weighted by what the probe measured."""
        return all(unit.weight is not None for unit in self.units)

    @property
    def n_weights(self) -> int:
        """Weights of all units."""
        return sum(unit.n_weights for unit in self.units)

    def costs(self, weighted: bool = True) -> list[list[float | None]]:
        """The predicted cost of each format of each unit: KL in nats per token.

        Unweighted, or where no weights were measured: squared errors relative to the outputs.
        """
        found = []
        for unit in self.units:
            weight = unit.weight if weighted and self.is_weighted else None
            factor = 1 / max(unit.energy, 1e-30) if weight is None else weight
            found.append([None if e is None else e * factor for e in unit.errors])
        return found

    def sizes(self) -> list[list[int | None]]:
        """Bytes of each format of each unit."""
        return [unit.sizes for unit in self.units]

    def only(self, formats: Sequence[str]) -> "Table":
        """The same table with only some of its formats."""
        places = [self.formats.index(name) for name in formats]
        units = [
            unit.model_copy(
                update={
                    "sizes": [unit.sizes[p] for p in places],
                    "errors": [unit.errors[p] for p in places],
                }
            )
            for unit in self.units
        ]
        return self.model_copy(update={"formats": list(formats), "units": units})

    def size_of(self, choice: Sequence[int]) -> int:
        """Bytes of all units with these formats."""
        return sum(unit.sizes[p] or 0 for unit, p in zip(self.units, choice, strict=True))

    def bits_of(self, choice: Sequence[int]) -> float:
        """Stored bits per weight of the units."""
        return 8 * self.size_of(choice) / self.n_weights

    def cost_of(self, choice: Sequence[int], weighted: bool = True) -> float:
        """The predicted cost of a choice."""
        costs = self.costs(weighted)
        return sum(row[p] or 0.0 for row, p in zip(costs, choice, strict=True))

    def to_json(self) -> dict[str, Any]:
        """The table as plain data, with the derived weights."""
        return self.model_dump(mode="json")

    def write(self, folder: Path) -> None:
        """Write it into a folder, under its usual name."""
        write_text(folder / FILE, self.text())

    def text(self) -> str:
        """The file's text: one line per unit."""
        data = self.to_json()
        rows = ",\n".join(f"    {json.dumps(row)}" for row in data.pop("units"))
        head = json.dumps(data, indent=2).removesuffix("\n}")
        return f'{head},\n  "units": [\n{rows}\n  ]\n}}\n'

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Read it from a file, or from the folder that holds it."""
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise DataError(
                f"{path} does not exist; `quantkit sensitivity MODEL --calibration SET -o DIR` "
                "writes one"
            )
        try:
            data = parse_json(path.read_bytes())
            table = as_record(cls, data)
        except ValidationError as error:
            raise DataError(f"{path} is not a table: {json_problem(error, cls)}") from error
        except ValueError as error:
            raise DataError(f"{path} is not a table: {error}") from error
        if table.version != VERSION:
            raise DataError(
                f"{path} was made by another version of quantkit, which measured otherwise; make "
                "it again with `quantkit sensitivity`"
            )
        width = len(table.formats)
        for unit in table.units:
            if len(unit.sizes) != width or len(unit.errors) != width:
                raise DataError(f"{path}: {unit.name} does not have {width} formats; make it again")
        return table
