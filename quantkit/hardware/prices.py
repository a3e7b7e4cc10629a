"""What an hour of a GPU costs, from a file that says when that was so.

date: 2026-11-01
currency: USD
per_hour:
  H100 SXM: 2.49
  L40S: 0.86
"""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import AdviceError
from quantkit.hardware import gpus
from quantkit.hardware.gpus import GPU
from quantkit.parsing import parse_yaml


@dataclass(frozen=True)
class Prices:
    """Price per GPU-hour, by the GPU's full name."""

    path: Path
    date: datetime.date
    per_hour: Mapping[str, float]
    currency: str = ""

    def of(self, gpu: GPU) -> float | None:
        return self.per_hour.get(gpu.name)

    @property
    def words(self) -> str:
        """Where the prices come from, and their date."""
        money = f" in {self.currency}" if self.currency else ""
        return f"Prices{money} are those of {self.date:%Y-%m-%d} in {self.path}."


def read(path: Path) -> Prices:
    """Read the prices in a file; refused without a date, since GPU prices do not last."""
    import yaml

    try:
        data = parse_yaml(path.read_bytes(), yaml.SafeLoader)
    except (OSError, ValueError) as error:
        raise AdviceError(f"cannot read the prices in {path}: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("per_hour"), dict):
        raise AdviceError(
            f"{path} holds no prices; write `per_hour:` with a line `GPU: PRICE` each"
        )
    date = data.get("date")
    if not isinstance(date, datetime.date):
        raise AdviceError(f"{path} does not say of when its prices are; write `date: 2026-11-01`")
    found = {}
    for name, price in data["per_hour"].items():
        if not isinstance(price, int | float) or not 0 < price < math.inf:
            raise AdviceError(f"{path}: {name} costs {price}, which is not a price")
        found[gpus.find(str(name)).name] = float(price)
    return Prices(path, date, found, str(data.get("currency") or ""))
