"""Find calibration sets by name, without torch."""

from pathlib import Path

from quantkit import resources
from quantkit.calibration import spec
from quantkit.calibration.reading.files import is_data
from quantkit.calibration.spec import SetSpec
from quantkit.errors import DataError
from quantkit.nearby import similar, within

FILE = "calibration.json"
"""The file that marks a folder as a finished set."""


def is_set(path: Path) -> bool:
    """Whether a folder holds a set."""
    return (path / FILE).is_file()


def require_set(path: Path) -> None:
    """Refuse a folder that does not hold a set."""
    if not path.exists():
        name = str(path)
        if name in resources.names("calibration"):
            raise DataError(
                f"{name} is a description of a set, not yet a set: `quantkit calibrate build "
                f"{name} --model MODEL -o DIR` makes one, with a model's tokenizer"
            )
        raise DataError(f"there is no folder {path}{similar(path)}")
    if not is_set(path):
        raise DataError(
            f"{path} is not a calibration set: it has no {FILE}{within(path, FILE)}; `quantkit "
            "calibrate build` makes one"
        )


def find(name: str) -> tuple[SetSpec, Path]:
    """A set's file by name or path, or a set of one data file; and the base folder of its paths."""
    shipped = name in resources.names("calibration")
    if name == "-" or (is_data(name) and not shipped):
        return spec.of_files([name]), Path()
    path = resources.find("calibration", name)
    return spec.read(path), path.parent
