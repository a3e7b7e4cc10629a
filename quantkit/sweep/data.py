"""Checks once, before the first step, that the data of a sweep can be read."""

from quantkit.calibration import spec as set_spec
from quantkit.errors import QuantkitError, SweepError
from quantkit.sweep import result
from quantkit.sweep.driver import Prepared

GAP = "\0"
"""Stands for a dataset's name, so that what holds for several is said once."""


def require(prepared: Prepared) -> None:
    """Refuse a sweep whose tasks or calibration sets cannot be read here.

    One look at each dataset that unfinished steps need: its description, or its first row.
    """
    there = set(prepared.place.names(result.FOLDER))
    open_steps = [step for step in prepared.graph.steps.values() if step.name not in there]
    tasks = {step.work["task"] for step in open_steps if step.kind == "score"}
    wrong = _unread_tasks(sorted(tasks))
    if any(step.kind == "quantize" for step in open_steps):
        wrong += _unread_sets(prepared)
    if wrong:
        raise SweepError(
            "\n  ".join(["the data of this sweep cannot be read; nothing was started:", *wrong])
        )


def _unread_tasks(tasks: list[str]) -> list[str]:
    from quantkit.scoring import lmeval

    try:
        lmeval.require_data(tasks)
    except QuantkitError as error:
        return [str(error)]
    return []


def _unread_sets(prepared: Prepared) -> list[str]:
    from quantkit.calibration.reading import hub

    if not any(prepared.sweep.learns(recipe) for recipe in prepared.sweep.recipes):
        return []
    wrong = []
    for one in prepared.sweep.sets:
        wanted = set_spec.SetSpec.model_validate(one.work["spec"]) if "spec" in one.work else None
        reasons: dict[str, list[str]] = {}  # datasets by what is said of them
        for source in wanted.sources if wanted is not None else ():
            if not isinstance(source, set_spec.Hub):
                continue
            try:
                next(hub.stream(source.dataset, source.config, source.split, source.revision))
            except QuantkitError as error:
                reasons.setdefault(str(error).replace(source.dataset, GAP), []).append(
                    source.dataset
                )
        for reason, (first, *others) in reasons.items():
            also = f"; the same for {', '.join(others)}" if others else ""
            wrong.append(f"calibration set {one.label}: {reason.replace(GAP, first)}{also}")
    return wrong
