"""Calibration sets by the name that people give, found without torch."""

from pathlib import Path

from quantkit import resources
from quantkit.calibration import spec
from quantkit.calibration.reading.files import is_data
from quantkit.calibration.spec import SetSpec
from quantkit.errors import DataError

FILE = "calibration.json"
"""What marks a folder as a finished set."""


def is_set(path: Path) -> bool:
    """Whether a folder holds a set."""
    return (path / FILE).is_file()


def require_set(path: Path) -> None:
    """Refuse a folder that holds none."""
    if not is_set(path):
        raise DataError(f"{path} is not a calibration set: it has no {FILE}")


def find(name: str) -> tuple[SetSpec, Path]:
    """A set's file by its name or path, or a set of one file of data; and where its paths start."""
    shipped = name in resources.names("calibration")
    if name == "-" or (is_data(name) and not shipped):
        return spec.of_files([name]), Path()
    path = resources.find("calibration", name)
    return spec.read(path), path.parent
