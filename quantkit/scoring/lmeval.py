"""The interface to lm-eval: tasks by name, with their data, and one run over them.

Its task definitions are used unchanged. What it does slowly around them is done here in another way
with the same result.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

from quantkit.errors import ScoreError
from quantkit.quiet import only_errors
from quantkit.scoring import sandbox, task_index, task_names, task_needs
from quantkit.scoring.options import Chat
from quantkit.scoring.suites import FOLLOWED, expanded, is_own, is_path
from quantkit.scoring.task_needs import Tokenizer

BOOTSTRAP_ITERATIONS = 100  # with 0, lm-eval leaves out all standard errors


def version() -> str:
    """Version of the installed lm-eval."""
    return metadata.version("lm_eval")


def check(tasks: Sequence[str]) -> tuple[str, ...]:
    """All tasks by their own names; unknown ones are refused before anything slow."""
    with quiet():
        found = names(tasks)
    return (*found, FOLLOWED) if FOLLOWED in expanded(tasks) else found


def names(tasks: Sequence[str]) -> tuple[str, ...]:
    """lm-eval's names of tasks: suites and folders of definitions expanded."""
    wanted = [task for task in expanded(tasks) if task != FOLLOWED]
    _manager([task for task in wanted if not is_path(task)])
    found = [part for task in wanted for part in (_inside(task) if is_path(task) else (task,))]
    return tuple(dict.fromkeys(found))


def groups(tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Groups among tasks and within them: their members, and how their scores are aggregated.

    Known without any task's data. A group that changes its members' settings is left out: its parts
    are not the tasks of those names.
    """
    index = _manager(tasks).task_index
    found: dict[str, dict[str, Any]] = {}

    def look(name: str) -> None:
        entry = index.get(name)
        if entry is None or name in found or entry.kind.name not in ("GROUP", "TAG"):
            return
        members = entry.cfg.get("task", []) if entry.kind.name == "GROUP" else sorted(entry.tags)
        if not isinstance(members, list) or not all(isinstance(m, str) for m in members):
            return
        listed = (entry.cfg or {}).get("aggregate_metric_list") or []
        found[name] = {
            "members": members,
            "metrics": [
                {"metric": m["metric"], "weight_by_size": m.get("weight_by_size", True)}
                for m in (listed if isinstance(listed, list) else [listed])
            ],
            "version": str((entry.cfg or {}).get("metadata", {}).get("version", "")),
            "is_tag": entry.kind.name == "TAG",
        }
        for member in members:
            look(member)

    for task in tasks:
        look(task)
    return found


def require_data(tasks: Sequence[str]) -> None:
    """Refuse tasks whose datasets cannot be reached; each dataset is looked up, not loaded."""
    wanted = [task for task in names(tasks) if not is_own(task)]
    if not wanted:
        return
    import datasets

    index, seen = _manager(wanted).task_index, set()
    for task in wanted:
        config = index[task].cfg or {}
        place = config.get("dataset_path")
        if not isinstance(place, str) or not place or place in seen:
            continue
        seen.add(place)
        with task_needs.loading(task), quiet():
            datasets.load_dataset_builder(place, name=config.get("dataset_name"))


def load(
    tasks: Sequence[str],
    data: Path | None,
    num_fewshot: int | None = None,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """Tasks and groups with their documents, ready to run.

    Documents are read once for all models of a run; few-shot examples are drawn again for each.
    Tasks that make documents of a certain length measure them with the tokenizer.
    """
    digest = None if data is None else task_needs.folder_digest(data)
    wanted = names(tasks)
    measure = tokenizer if _makes_documents(wanted) else None
    loaded = _loaded(wanted, data, digest, num_fewshot, measure)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=seed)
    return loaded


@lru_cache(maxsize=1)
def _loaded(
    tasks: tuple[str, ...],
    data: Path | None,
    digest: str | None,
    num_fewshot: int | None,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    manager = _manager(tasks)
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    with ExitStack() as around:
        around.enter_context(task_needs.data_from(data, digest))
        if not all(map(is_own, tasks)):
            around.enter_context(task_needs.nltk_data(data))
        around.enter_context(task_needs.measured_by(tokenizer, task_index.METADATA))
        around.enter_context(_code_in_a_box())
        # One at a time: an error names its task, and what one draws does not depend on the others.
        for task in tasks:
            with task_needs.loading(task), task_needs.seeded():
                found = manager.load([task])
            if twice := sorted(loaded["tasks"].keys() & found["tasks"].keys()):
                raise ScoreError(
                    f"--tasks asks for {twice[0]} twice, once in {task}; leave one out"
                )
            for kind, parts in found.items():
                loaded[kind] |= parts
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        if num_fewshot is not None and default != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif default is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def _makes_documents(tasks: Sequence[str]) -> bool:
    """Whether any of them makes its documents when it is loaded, such as needles in a haystack."""
    if all(map(is_own, tasks)):
        return False
    index = _manager(tasks).task_index
    members = {name for group in groups(tasks).values() for name in group["members"]}
    parts = [index[name] for name in {*tasks, *members} if name in index and not is_own(name)]
    return any("custom_dataset" in (part.cfg or {}) for part in parts)


def run(
    lm: Any,
    loaded: dict[str, Any],
    limit: int | None,
    samples: dict[str, list[int]] | None,
    chat: Chat | None = None,
) -> dict[str, Any]:
    """All results of a model on loaded tasks."""
    if not loaded["tasks"]:
        return {"results": {}, "samples": {}, "versions": {}, "n-samples": {}}
    import lm_eval

    chat = chat or Chat()
    # Not `simple_evaluate`: it also collects facts about the machine, which takes longer than
    # scoring a small model, and runs git in the working directory.
    with task_needs.explained(list(loaded["tasks"])), templates_compiled_once():
        results = lm_eval.evaluate(
            lm=lm,
            task_dict=loaded,
            limit=limit,
            samples=samples,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
            log_samples=True,
            apply_chat_template=chat.template,
            fewshot_as_multiturn=chat.multiturn,
            system_instruction=chat.system,
            confirm_run_unsafe_code=sandbox.CODE_EVAL.is_allowed,
        )
    assert results is not None
    return dict(results)


def allow_code(loaded: dict[str, Any], is_allowed: bool) -> None:
    """Allow tasks to run what the model writes, in a sandbox; refuse such tasks where not allowed.

    Also refused where the machine cannot provide such a sandbox, before a model is loaded.
    """
    running = [
        name
        for name, task in loaded["tasks"].items()
        if getattr(task, "UNSAFE_CODE", False) or getattr(task.config, "unsafe_code", False)
    ]
    if running and not is_allowed:
        raise ScoreError(sandbox.REFUSAL.format(task=f"task {running[0]}"))
    if running:
        sandbox.check()
    sandbox.CODE_EVAL.is_allowed = is_allowed


@contextmanager
def _code_in_a_box() -> Iterator[None]:
    """Replace the metric for programs by ours, which tasks try when they are loaded."""
    import evaluate

    usual = evaluate.load

    def load(path: str, *more: Any, **options: Any) -> Any:
        return sandbox.CODE_EVAL if path == "code_eval" else usual(path, *more, **options)

    evaluate.load = load
    sandbox.CODE_EVAL.is_loading = True
    try:
        yield
    finally:
        evaluate.load = usual
        sandbox.CODE_EVAL.is_loading = False


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and notices of lm-eval and the libraries it uses."""
    # Set explicitly, the library neither falls back to one thread nor warns that it might.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with (
        only_errors("lm_eval", "transformers", "datasets"),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        yield


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Keep lm-eval from compiling a task's templates for every document.

    Without this, five-shot MMLU takes longer to format than a small model takes to answer it.
    """
    from lm_eval import utils

    compiled = lru_cache(maxsize=4096)(utils.env.from_string)
    utils.env.from_string = compiled
    try:
        yield
    finally:
        del utils.env.from_string


def _inside(path: str) -> tuple[str, ...]:
    """The tasks of a folder of definitions, or of one file."""
    found = Path(path).expanduser().resolve()
    if not found.exists():
        raise ScoreError(f"--tasks {path}: there is no such file or folder")
    folder = found if found.is_dir() else found.parent
    index = task_index.own_tasks((str(folder),)).task_index
    inside = [
        name
        for name, entry in index.items()
        if entry.yaml_path is not None and found in (entry.yaml_path, *entry.yaml_path.parents)
    ]
    # Members of a group in the same folder are scored with it.
    members = {m for name in inside for m in _members(index[name])}
    chosen = tuple(sorted(name for name in inside if name not in members))
    if not chosen:
        raise ScoreError(f"--tasks {path} has no task: lm-eval's definitions are YAML files")
    FOLDERS.add(str(folder))
    return chosen


FOLDERS: set[str] = set()
"""Folders of definitions that were used in this process."""


def _members(entry: Any) -> list[str]:
    inside = (entry.cfg or {}).get("task") if entry.kind.name == "GROUP" else None
    return [m for m in inside if isinstance(m, str)] if isinstance(inside, list) else []


def _manager(tasks: Sequence[str]) -> Any:
    # lm-eval reads thousands of files to list its own tasks; ours alone load in moments.
    folders = tuple(sorted(FOLDERS))
    manager = task_index.own_tasks(folders)
    if missing := [task for task in tasks if task not in manager.all_tasks]:
        task_names.check(missing, manager.all_tasks)  # as text, in a tenth of the time
        manager = task_index.reaching(tuple(sorted(set(missing))), folders)
    for task in tasks:
        if task not in manager.all_tasks:
            raise task_names.unknown(task, task_index.all_tasks(folders).all_tasks)
    return manager
