"""Compare several models by quality, if all of them were scored on the same questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.advise.recommendation import Recommendation

if TYPE_CHECKING:
    from quantkit.report.document import Document, Entry


@dataclass(frozen=True)
class ModelComparison:
    """Accuracy of models in their chosen formats, on the tasks they have in common."""

    tasks: tuple[str, ...]
    accuracy: Mapping[str, float]
    """Mean over tasks, by model; only if every model has it."""
    why_not: str = ""
    """Why qualities are not compared; empty if they are."""

    @property
    def best(self) -> str | None:
        """The model with the highest accuracy."""
        return max(self.accuracy, key=lambda name: self.accuracy[name], default=None)


def compare(found: Sequence[Recommendation], reports: Mapping[str, "Document"]) -> ModelComparison:
    """What reports say about the chosen formats, by model name.

    No comparison is made if a model has no report or was scored on other questions.
    """
    serving = [one for one in found if one.chosen is not None]
    names = [one.question.catalogue.shape.label for one in serving]
    if without := [name for name in names if name not in reports]:
        reason = f"no report of {', '.join(without)}" if reports else "no reports were given"
        return ModelComparison((), {}, reason)
    if not serving:
        return ModelComparison((), {}, "no format fits for any of them")
    entries = {}
    for name, one in zip(names, serving, strict=True):
        assert one.chosen is not None
        entry = _entry(reports[name], one.chosen.format.name)
        if entry is None:
            return ModelComparison(
                (), {}, f"the report of {name} does not cover {one.chosen.format.name}"
            )
        entries[name] = entry
    first = entries[names[0]]
    tasks = [task for task in first.settings.tasks if f"{task}/acc" in first.scores]
    for name, entry in entries.items():
        if different := _differences(first, entry, tasks):
            return ModelComparison(
                (), {}, f"{names[0]} and {name} were scored differently: {different}"
            )
    if not tasks:
        return ModelComparison((), {}, "the reports have no accuracies")
    means = {
        name: sum(entry.scores[f"{task}/acc"].value for task in tasks) / len(tasks)
        for name, entry in entries.items()
    }
    return ModelComparison(tuple(tasks), means)


def _entry(document: "Document", format: str) -> "Entry | None":
    from quantkit.advise.formats import UNQUANTISED, UNQUANTISED_GGUF

    if format in (UNQUANTISED, UNQUANTISED_GGUF):
        return document.baseline
    return next((entry for entry in document.candidates if entry.recipe == format), None)


def _differences(one: "Entry", other: "Entry", tasks: Sequence[str]) -> str:
    """Why accuracies are not comparable; the window is each model's own."""
    if missing := [task for task in tasks if f"{task}/acc" not in other.scores]:
        return f"no {', '.join(missing)}"
    left, right = one.settings, other.settings
    differences = []
    for task in tasks:
        if left.tasks[task] != right.tasks.get(task):
            differences.append(f"version of {task}")
        if left.data and right.data and left.data.get(task) != right.data.get(task):
            differences.append(f"documents of {task}")
    for key in ("limit", "num_fewshot"):
        if getattr(left, key) != getattr(right, key):
            differences.append(key)
    return ", ".join(dict.fromkeys(differences))
