"""What is on this machine, and what would have to be downloaded from a hub."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.calibration.spec import SetSpec


def is_local(model: Any) -> bool:
    """Whether a model needs no hub; one in memory does not."""
    return not isinstance(model, str | Path) or str(model) == "demo" or Path(model).exists()


def any_named(folders: Iterable[Path]) -> bool:
    """Whether any of them is a hub id."""
    from quantkit.model.source import is_hub_id

    return any(is_hub_id(str(folder)) for folder in folders)


def tasks_need(tasks: Iterable[str], data: Path | None = None) -> bool:
    """Whether tasks download documents: those that ship with quantkit do not."""
    from quantkit.scoring import suites

    return data is None and not all(map(suites.is_own, tasks))


def set_needs(name: Any) -> bool:
    """Whether a calibration set has to download rows, or tasks that it avoids."""
    from quantkit import resources
    from quantkit.calibration import spec
    from quantkit.calibration.reading.files import is_data

    if not isinstance(name, str | Path) or str(name) == "-":
        return False
    text = str(name)
    if is_data(text) and text not in resources.names("calibration"):
        return False
    return sources_need(spec.read(resources.find("calibration", text)))


def sources_need(wanted: "SetSpec", data: Path | None = None) -> bool:
    """The same for a parsed set."""
    return any(source.kind == "hub" for source in wanted.sources) or tasks_need(
        avoided_tasks(wanted.avoid), data
    )


def avoided_tasks(avoid: Sequence[str]) -> list[str]:
    """Tasks among what a set avoids; the others are files."""
    from quantkit.calibration.reading.files import is_data

    return [name for name in avoid if not is_data(name)]
