"""Streams rows of a dataset on the Hugging Face hub."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.calibration.reading.record import Record
from quantkit.errors import DataError
from quantkit.quiet import only_errors

MOST_NAMED = 8
"""Most configs or splits that an error names."""


def stream(
    dataset: str,
    config: str | None,
    split: str,
    revision: str | None,
    data: Path | None = None,
) -> Iterator[Record]:
    """The rows of one split; a folder of that name takes the hub's place, as in `datasets`.

    `data` is a tree of such folders, for machines without access to the hub.
    """
    # The library retries the hub for half a minute and reports each attempt.
    with only_errors("datasets", "huggingface_hub"):
        here = data is not None and (data / dataset).is_dir()
        place = str(data / dataset) if data is not None and here else dataset
        rows = _opened(place, config, split, None if here else revision)
        name = f"{dataset}/{config}:{split}" if config else f"{dataset}:{split}"
        number = 0
        while True:
            try:
                value = next(rows, None)
            except Exception as error:
                # Every file format and network layer below has errors of its own.
                raise DataError(
                    f"{name}: row {number + 1} cannot be read ({_first_line(error)}); "
                    "repair the dataset, or download it and give it as a `files` source"
                ) from error
            if value is None:
                break
            number += 1
            yield Record(f"{name}:{number}", value)
        if not number:
            raise DataError(f"{name} holds no rows")


def _opened(
    dataset: str, config: str | None, split: str, revision: str | None
) -> Iterator[dict[str, Any]]:
    """An iterator over rows, or one sentence about why there is none."""
    import datasets

    what = f"dataset {dataset}"
    try:
        try:
            rows = _load(dataset, config, split, revision)
        except (ConnectionError, datasets.exceptions.DatasetNotFoundError):
            if not (_offline() and (folder := _downloaded(dataset, revision))):
                raise
            rows = _load(str(folder), config, split, None)
    except ConnectionError as error:
        raise DataError(_unreachable(what)) from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"there is no {what} on the hub, or it needs a login: check the name and the "
            "revision, and `hf auth login` for gated ones"
        ) from error
    except ValueError as error:
        raise DataError(_no_such_part(what, config, split, error)) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{what} cannot be read: {_first_line(error)}") from error
    except RuntimeError as error:
        # This is how the library refuses datasets that are programs.
        raise DataError(f"{what} cannot be read: {_first_line(error)}") from error
    return iter(rows)


def _load(dataset: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets

    rows = datasets.load_dataset(
        dataset, name=config, split=split, revision=revision, streaming=True
    )
    # Images and audio stay encoded; nothing here decodes them.
    return rows.decode(False) if rows.features else rows


def _downloaded(dataset: str, revision: str | None) -> Path | None:
    """The folder that `hf download --repo-type dataset` left in the hub cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                dataset, repo_type="dataset", revision=revision, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _unreachable(what: str) -> str:
    if _offline():
        return (
            f"{what} is not a folder here and not in the hub cache, and HF_HUB_OFFLINE is set; "
            "connect once to fill the cache, or give a local copy as a `files` source"
        )
    return (
        f"the hub cannot be reached for {what}; set HF_HUB_OFFLINE=1 to work from a filled "
        "cache, or give a local copy as a `files` source"
    )


def _no_such_part(what: str, config: str | None, split: str, error: ValueError) -> str:
    """`datasets` lists the known names at the end of its message."""
    message = str(error)
    if "split" in message.lower():
        missing = f"{what} has no split {split}"
    elif config is not None and f"'{config}'" in message:
        missing = f"{what} has no config {config}"
    elif "config name is missing" in message.lower():
        missing = f"{what} has several configs and none was asked for"
    else:
        return f"{what} cannot be read: {_first_line(error)}"
    _, opened, rest = message.partition("[")
    names = [name.strip(" '\"") for name in rest.partition("]")[0].split(",") if opened]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{missing}; it has {', '.join(names[:MOST_NAMED])}{more}" if any(names) else missing


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
