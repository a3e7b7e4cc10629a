"""Validation of a command line without torch, before any heavy import.

Stages refuse the same with the same words, for callers from Python. Here it happens at once: a
misspelt name is the most common error, and imports take seconds, on a busy machine far longer.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from quantkit.errors import CheckpointError, DataError, EngineError, ScoreError, StorageError
from quantkit.storage import MANIFEST, refuse_existing, require_writable


def models(names: Iterable[str], revision: str | None = None) -> None:
    """Every model or checkpoint exists and is readable; from a hub, its config is fetched first."""
    from quantkit.export.foreign_gguf import file_of
    from quantkit.export.manifest import Manifest, is_checkpoint
    from quantkit.model.source import locate, read_config

    for name in names:
        if is_checkpoint(Path(name)):
            Manifest.read(Path(name))
        elif file_of(name) is None:
            folder = locate(name, revision, weights=False)
            if file_of(folder) is None:
                read_config(folder)


def source_among(names: Iterable[str]) -> None:
    """At least one is not our checkpoint: a comparison needs the source they were made from."""
    from quantkit.export.foreign import no_source
    from quantkit.export.foreign_gguf import file_of
    from quantkit.export.manifest import is_checkpoint

    if all(is_checkpoint(Path(name)) or file_of(name) for name in names):
        raise no_source("none")


def folders(checkpoints: Iterable[Path]) -> None:
    """Every folder exists and is not a source model; `verify` checks its contents."""
    from quantkit.export.manifest import Manifest

    for folder in checkpoints:
        if _is_source(folder):
            raise CheckpointError(
                f"{folder} is not quantised; name a checkpoint, such as out/fp8-dynamic after "
                f"`quantkit quantize {folder} -r fp8-dynamic -o out`"
            )
        is_gguf = folder.suffix == ".gguf" and folder.is_file()
        if not folder.is_dir() and not is_gguf:
            Manifest.read(folder)  # the error names what is there instead


def _is_source(folder: Path) -> bool:
    from quantkit.export.manifest import is_checkpoint
    from quantkit.model.config import method_of
    from quantkit.model.source import read_config

    if not folder.is_dir():
        return str(folder) == "demo"
    if is_checkpoint(folder) or not (folder / "config.json").is_file():
        return False
    return method_of(read_config(folder)) is None


def calibration(name: str | None) -> None:
    """A set of that name ships with quantkit, or there is data."""
    from quantkit.calibration.lookup import find
    from quantkit.calibration.reading import files
    from quantkit.home import expanded

    if name is None or name == "-" or expanded(name).is_dir():
        return
    _, base = find(name)
    if base == Path():  # data, not a set's file
        files.find(name)


def tasks(names: Sequence[str], data: Path | None = None, prompts: Path | None = None) -> None:
    """lm-eval may have these tasks, and the other inputs exist."""
    from quantkit.scoring import task_names

    task_names.check(names)
    if data is not None and not data.is_dir():
        raise ScoreError(f"--data {data} is not a folder")
    if prompts is not None and not prompts.is_file():
        raise DataError(f"--prompts {prompts}: there is no such file")


def program(python: Path | None) -> None:
    """A named Python exists."""
    from quantkit.home import expanded

    if python is not None and not expanded(python).is_file():
        raise EngineError(f"--python {python} is not a file; name the Python of vLLM's environment")


def file(path: Path | None) -> None:
    """A named file exists."""
    if path is not None and not path.exists():
        raise DataError(f"cannot read {path}: No such file or directory")


def output(folder: Path | None) -> None:
    """A folder can be created or written to."""
    if folder is not None:
        require_writable(folder)


def new_folder(folder: Path, force: bool, marker: str = MANIFEST) -> None:
    """The same for a folder that must not exist yet, or be ours."""
    require_writable(folder.parent)
    refuse_existing(folder, force, marker)


def new_report(folder: Path, force: bool) -> None:
    """An earlier report, and the scores beside it, are not replaced unless `force`."""
    if (folder / "report.json").exists() and not force:
        raise StorageError(
            f"{folder / 'report.json'} exists already; use --force to replace it and its scores, "
            "or another --out"
        )
