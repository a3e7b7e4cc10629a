"""lm-eval's index of tasks, read from as few of its files as hold the tasks in question.

To list its tasks, lm-eval parses all of its files, some ten thousand, which takes longer than many
a score. Each benchmark has a folder of its own there: those whose text contains a name are parsed,
by lm-eval and in its order, and so is what groups and tags in them lead to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.scoring import task_names
from quantkit.scoring.suites import OWN_TASKS

METADATA = {"tokenizer": ""}
"""What lm-eval adds to every task that it loads. Never empty: lm-eval would then keep another."""


@cache
def own_tasks(folders: tuple[str, ...]) -> Any:
    """Our tasks and those in the user's folders."""
    return _read(folders, False)


@cache
def all_tasks(folders: tuple[str, ...]) -> Any:
    """These and all of lm-eval's."""
    return _read(folders, True)


@cache
def reaching(tasks: tuple[str, ...], folders: tuple[str, ...]) -> Any:
    """These and what lm-eval has under some names; everything where its files are kept otherwise
    than expected.
    """
    sought = set(tasks)
    while True:
        with _only(task_names.places(sought)) as is_possible:
            if not is_possible:
                return all_tasks(folders)
            found = _read(folders, True)
        index = found.task_index
        reached = _reached(tasks, index)
        # Tags collect tasks from anywhere; other names have one definition, which is here or not.
        away = {name for name in reached if name not in index or index[name].kind.name == "TAG"}
        if away <= sought:
            return found
        sought |= away


def _read(folders: tuple[str, ...], with_defaults: bool) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(
        include_path=[str(OWN_TASKS), *folders],
        include_defaults=with_defaults,
        metadata=METADATA,
    )


@contextmanager
def _only(places: set[str] | None) -> Iterator[bool]:
    """Let lm-eval read these of its own folders alone; False where that cannot be done."""
    try:
        from lm_eval.tasks._index import TaskIndex
    except ImportError:
        places = None
    if places is None or not hasattr(TaskIndex, "_iter_yaml_files"):
        yield False
        return
    usual, home = TaskIndex._iter_yaml_files, task_names.definitions()

    def some(root: Path) -> Iterator[Path]:
        if root.resolve() != home:
            return usual(root)
        inside = [file for place in places for file in usual(root / place)]
        return iter(sorted(inside, key=Path.as_posix))

    TaskIndex._iter_yaml_files = staticmethod(some)
    try:
        yield True
    finally:
        TaskIndex._iter_yaml_files = staticmethod(usual)


def _reached(tasks: Sequence[str], index: dict[str, Any]) -> set[str]:
    """These names and those of all members, theirs included."""
    found: set[str] = set()
    left = list(tasks)
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        entry = index.get(name)
        if entry is not None and entry.kind.name == "GROUP":
            left += _named(entry.cfg.get("task"))
        elif entry is not None and entry.kind.name == "TAG":
            left += entry.tags
    return found


def _named(members: Any) -> list[str]:
    """Names in a group's list, whose items may be groups in turn."""
    if isinstance(members, str):
        return [members]
    if isinstance(members, dict):
        return [name for key in ("task", "group") for name in _named(members.get(key))]
    return [name for one in members or [] for name in _named(one)]
