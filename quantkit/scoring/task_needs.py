"""What tasks need besides a model: packages, data, a tokenizer. What is missing is named at once.

lm-eval's tasks import packages of their own, download data while they are loaded, and some make
their documents then.
"""

import hashlib
import os
import random
import shlex
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit import resources
from quantkit.errors import MissingDependency, QuantkitError, ScoreError

EXTRA = frozenset(
    {
        "antlr4",
        "immutabledict",
        "langdetect",
        "latex2sympy2_extended",
        "math_verify",
        "nltk",
        "scipy",
        "sympy",
        "wonderwords",
    }
)
"""Packages that the extra `tasks` installs, by the names they are imported under."""
RANDOM_SEED, NUMPY_SEED = 0, 1234  # lm-eval's own, so that tasks draw the same documents


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model folder, which is loaded where a task asks for it."""

    digest: str
    folder: Path = field(compare=False)
    trust_remote_code: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, folder: Path, trust_remote_code: bool = False) -> "Tokenizer":
        from quantkit.model.source import TOKENIZER_FILES

        digest = hashlib.sha256()
        for path in sorted({path for name in TOKENIZER_FILES for path in folder.glob(name)}):
            digest.update(path.name.encode() + path.read_bytes())
        return cls(digest.hexdigest()[:16], folder, trust_remote_code)

    @property
    def name(self) -> str:
        """What tasks know it by."""
        return f"quantkit-{self.digest}"

    def load(self) -> Any:
        from quantkit.model import tokenizer

        return tokenizer.load(self.folder, self.trust_remote_code)


@contextmanager
def loading(task: str) -> Iterator[None]:
    """Turn all errors of loading a task into ours: its code and its data are others'."""
    try:
        with explained([task]):
            yield
    except QuantkitError:
        raise
    except Exception as error:
        raise ScoreError(
            f"lm-eval cannot load the task {task}: {_first_line(error)}; check its data and its "
            "packages, or leave it out"
        ) from error


@contextmanager
def explained(tasks: Sequence[str]) -> Iterator[None]:
    """Name the package or the data that tasks lack."""
    import requests

    named = ", ".join(tasks)
    try:
        yield
    except ImportError as error:
        # Some tasks raise an error of their own over the one that has the name.
        cause = error.__cause__
        name = error.name or (cause.name if isinstance(cause, ImportError) else None)
        what = f"the package {name}" if name else f"a package ({_first_line(error)})"
        top = (name or "").partition(".")[0]
        known = top in EXTRA or not top
        how = resources.install("tasks") if known else f"pip install {shlex.quote(top)}"
        raise MissingDependency(
            f"{'the task' if len(tasks) == 1 else 'a task of'} {named} needs {what}; install it: "
            f"{how}"
        ) from error
    except (ConnectionError, FileNotFoundError, requests.RequestException) as error:
        raise ScoreError(
            f"the data of {named} cannot be reached: {_first_line(error)}; connect to the hub "
            "once, or use `quantkit score` or `compare` with `--data DIR`, a folder that holds it "
            "under the dataset's name; the tasks python_docs and python_quiz need no hub"
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300].rstrip(" .;:") if text else type(error).__name__


@contextmanager
def data_from(folder: Path | None, digest: str | None) -> Iterator[None]:
    """Load datasets from a folder: the library tries a relative path before it asks a hub."""
    if folder is None:
        yield
        return
    import datasets

    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    usual = datasets.config.HF_DATASETS_CACHE
    # The library identifies prepared data by its path alone; here a changed folder counts as
    # another.
    datasets.config.HF_DATASETS_CACHE = Path(usual) / f"quantkit-{digest}"
    try:
        with chdir(folder):
            yield
    finally:
        datasets.config.HF_DATASETS_CACHE = usual


def folder_digest(folder: Path) -> str:
    """Of the names, sizes and times of all files."""
    if not folder.is_dir():
        raise ScoreError(f"--data {folder} is not a folder")
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def nltk_data(folder: Path | None) -> Iterator[None]:
    """Take NLTK's data from `nltk_data` in a folder of data, and refuse a task that cannot get it.

    NLTK only prints that a download failed. Such tasks would fail once all answers are there.
    """
    try:
        import nltk
    except ImportError:  # then a task that needs it says so
        yield
        return
    own = None if folder is None else str((folder / "nltk_data").absolute())
    if own is not None and Path(own).is_dir() and own not in nltk.data.path:
        nltk.data.path.insert(0, own)  # stays: answers are judged later
    usual = nltk.download

    def download(name: str, *more: Any, **options: Any) -> bool:
        if not usual(name, *more, **options):
            raise ScoreError(
                f"a task needs NLTK's {name}, which cannot be downloaded here; run `python -m "
                f"nltk.downloader {name}` on a machine with a network, and copy its nltk_data "
                "folder into --data DIR, or name it in NLTK_DATA"
            )
        return True

    nltk.download = download
    try:
        yield
    finally:
        nltk.download = usual


@contextmanager
def measured_by(tokenizer: Tokenizer | None, metadata: dict[str, str]) -> Iterator[None]:
    """Give tasks that measure their documents this tokenizer.

    They get a name and load it by that, with permission to run any code of a model's folder. So
    the name is one that only this finds, and what it finds was loaded as the user permits.
    """
    if tokenizer is None:
        yield
        return
    from transformers import AutoTokenizer

    usual = AutoTokenizer.__dict__["from_pretrained"]

    load = usual.__get__(None, AutoTokenizer)

    def from_pretrained(name: Any, *more: Any, **options: Any) -> Any:
        return tokenizer.load() if name == tokenizer.name else load(name, *more, **options)

    AutoTokenizer.from_pretrained = from_pretrained
    metadata["tokenizer"] = tokenizer.name
    try:
        yield
    finally:
        AutoTokenizer.from_pretrained = usual
        metadata["tokenizer"] = ""


@contextmanager
def seeded() -> Iterator[None]:
    """Let tasks draw what they draw in lm-eval's own command, and leave the generators as found."""
    import numpy

    states = random.getstate(), numpy.random.get_state()
    random.seed(RANDOM_SEED)
    numpy.random.seed(NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
