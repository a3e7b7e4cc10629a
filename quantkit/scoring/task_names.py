"""Whether lm-eval has a task, from its files alone: importing it takes twenty times as long.

Its definitions are YAML files. A name that no file contains is not a task; one that some file
contains is left to lm-eval, which reads them properly.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from quantkit.errors import ScoreError, UnknownName
from quantkit.scoring.suites import FOLLOWED, OWN_TASKS, expanded, is_own, is_path

DEFINED = re.compile(rb"\n(?:task|group|tag):[ \t]*[\"']?([\w.+-]+)")
INCLUDED = re.compile(rb"\ninclude:[ \t]*(\.\./[^\n]*)")
USUAL = ("python_docs", "python_quiz", "wikitext", "mmlu")


def check(tasks: Sequence[str], others: Sequence[str] = ()) -> None:
    """Refuse names that lm-eval cannot have; `others` may have been meant, too."""
    named = [task for task in expanded(tasks) if task != FOLLOWED and not is_own(task)]
    for task in named:
        if is_path(task) and not Path(task).expanduser().exists():
            raise ScoreError(f"--tasks {task}: there is no such file or folder")
    away = [task for task in named if not is_path(task)]
    if not away or not (folder := definitions()):
        return
    mentioned = _mentioned(folder, away)
    for task in away:
        if task not in mentioned:
            raise unknown(task, [*_defined(folder), *others])


def unknown(task: str, known: Sequence[str]) -> UnknownName:
    """The error, with near matches or our own tasks: lm-eval has thousands."""
    import difflib

    # Most names are too short or too long to be near, which is quick to check.
    likely = [name for name in known if abs(len(name) - len(task)) <= max(2, len(task) // 2)]
    near = difflib.get_close_matches(task, likely, n=3, cutoff=0.6) or USUAL
    return UnknownName("task", task, near, "All other lm-eval tasks work too.")


def places(tasks: Collection[str]) -> set[str] | None:
    """Which of lm-eval's folders mention one of these names, or take from one that does; None
    where it does not keep its definitions as known here.
    """
    folder = definitions()
    if folder is None:
        return None
    texts = _texts(folder)
    found = {place for place, text in texts.items() if any(_has(text, task) for task in tasks)}
    return {place for place, text in texts.items() if found & {place, *_taken_from(text)}}


def definitions() -> Path | None:
    """Where lm-eval keeps them; None where it is not installed, which is reported better
    elsewhere.
    """
    found = find_spec("lm_eval")
    if found is None or not found.origin:
        return None
    folder = Path(found.origin).resolve().with_name("tasks")
    return folder if folder.is_dir() else None


def _has(text: bytes, task: str) -> bool:
    """Whether a text has this name, and not only as a part of another."""
    name = task.encode()
    whole = rb"(?<![\w.+-])" + re.escape(name) + rb"(?![\w.+-])"
    return name in text and re.search(whole, text) is not None


def _taken_from(text: bytes) -> set[str]:
    """Folders from which definitions are included by a path that leads up and down again."""
    return {part.decode() for path in INCLUDED.findall(text) for part in path.split(b"/")}


def _mentioned(folder: Path, tasks: Sequence[str]) -> set[str]:
    """Those of `tasks` that any file contains; lists of tags and groups define some, too."""
    texts = _texts(folder).values()
    return {task for task in tasks if any(_has(text, task) for text in texts)}


def _defined(folder: Path) -> list[str]:
    """Names that files define literally."""
    named = DEFINED.findall(b"\n" + b"\n".join(_texts(folder).values()))
    return sorted({path.name for path in OWN_TASKS.iterdir()} | {name.decode() for name in named})


@cache
def _texts(folder: Path) -> dict[str, bytes]:
    """All definitions, by the folder in it that they are in; templates have no suffix."""
    with os.scandir(folder) as entries:
        inside = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return {name: b"\n".join(_read(folder / name)) for name in inside}


def _read(folder: Path | str) -> Iterator[bytes]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _read(entry.path)
            elif entry.name.endswith((".yaml", ".yml")) or "." not in entry.name:
                # Three times as fast as a Path for some ten thousand small files.
                number = os.open(entry.path, os.O_RDONLY)
                try:
                    yield os.read(number, 1 << 20)
                finally:
                    os.close(number)
