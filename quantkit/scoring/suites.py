"""Which tasks a name stands for: suites, and the tasks that ship with quantkit.

Fewer bits hardly affect perplexity and multiple choice. A damage suite also covers what breaks
first: answers that are generated token by token, where one slip leads to the next.
"""

from collections.abc import Sequence
from pathlib import Path

OWN_TASKS = Path(__file__).parent / "tasks"
FOLLOWED = "python_answers"
"""How closely a model follows its source's own answers; not a task of lm-eval."""
QUICK = "damage-quick"
DAMAGE = ("gsm8k", "ifeval", "mmlu", "wikitext", "needle_1k", "needle_4k", FOLLOWED)
SUITES = {
    QUICK: ("python_docs", "python_quiz", FOLLOWED),
    "damage": DAMAGE,
    "damage-code": (*DAMAGE, "humaneval"),
}
WITH_CODE = {"damage": "damage-code"}
"""What a suite becomes where code may run."""
DEMO = SUITES[QUICK]
DEFAULT = ("wikitext", "mmlu")


def expanded(tasks: Sequence[str]) -> tuple[str, ...]:
    """Tasks by their own names, each once."""
    return tuple(dict.fromkeys(part for task in tasks for part in SUITES.get(task, (task,))))


def with_code(tasks: Sequence[str]) -> tuple[str, ...]:
    """The same tasks where code that a model writes may run."""
    return tuple(WITH_CODE.get(task, task) for task in tasks)


def by_default(models: Sequence[str], follows: bool = True) -> tuple[str, ...]:
    """The default tasks: for the demo and what was made from it, only what needs no hub.

    Engines that only serve do not follow a source's answers.
    """
    tasks = DEMO if "demo" in models else DEFAULT
    return tasks if follows else tuple(task for task in tasks if task != FOLLOWED)


def is_own(task: str) -> bool:
    """Whether a task takes its data from this machine."""
    own = {FOLLOWED, *(path.stem for path in OWN_TASKS.glob("*/*.yaml"))}
    return own.issuperset(SUITES.get(task, (task,)))


def is_path(task: str) -> bool:
    """Whether a task is a folder of definitions, or one of them, rather than a name."""
    return "/" in task or task.endswith((".yaml", ".yml")) or Path(task).is_dir()
