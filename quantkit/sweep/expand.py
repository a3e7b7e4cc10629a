"""Expands a sweep into its graph: what is made once, what once per set, and the dependencies.

Recipes without data are made once per model, all others once per model and set; recipes of one
model and set share one pass; a source is scored once, and every candidate is compared with that.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantkit.recipe import AnyRecipe, GGUFRecipe
from quantkit.sweep import versions
from quantkit.sweep.graph import Graph, Step, digest_of
from quantkit.sweep.resolve import Calibration, Model, Resolved


@dataclass(frozen=True)
class Devices:
    """The devices: `cpu` or `cuda`, which give different bytes for the same recipe."""

    quantize: str
    score: str
    ranks: int = 1
    """GPUs that share one pass, whose sums have another order than on one."""


def expand(sweep: Resolved, devices: Devices) -> Graph:
    """All steps of a sweep."""
    by_model: dict[str, list[Step]] = {}
    made: dict[str, Step] = {}
    waiting = list(sweep.models)
    while waiting:  # models that others wait for come first
        model = next(m for m in waiting if all(name in by_model for name in m.after))
        waiting.remove(model)
        after = tuple(by_model[name][-1].name for name in model.after)
        by_model[model.label] = list(_of_model(sweep, model, devices, after))
    for model in sweep.models:
        made |= {step.name: step for step in by_model[model.label]}
    return Graph.of(made.values())


def _of_model(
    sweep: Resolved, model: Model, devices: Devices, after: tuple[str, ...]
) -> Iterator[Step]:
    """The steps of one model, its report last."""
    who = {k: v for k, v in asdict(model).items() if k not in ("label", "after")}
    scores: dict[str, dict[str, Step]] = {}

    def scored(title: str, decisive: Mapping[str, Any], needs: tuple[Step, ...]) -> Iterator[Step]:
        found = {}
        for unit in sweep.units:
            beside = (scores["source"][unit.task],) if "source" in scores else ()
            facts = {
                "task": unit.task,
                "limit": sweep.spec.limit,
                "max_length": sweep.spec.max_length,
                "device": devices.score,
            }
            together = unit.asked if sweep.spec.split == "task" else unit.task
            found[unit.task] = _step(
                "score",
                f"{title} {unit.task}",
                {**facts, **decisive},
                {"model": who, **facts, "title": title},
                (*needs, *beside),
                after=() if needs else after,
                together=f"{title} {together}",
            )
            yield found[unit.task]
        scores[title.removeprefix(f"{model.label} ")] = found

    yield from scored(f"{model.label} source", {"model": model.identity}, ())
    sets: dict[str, Step] = {}
    if any(sweep.learns(recipe) for recipe in sweep.recipes):
        for found in sweep.sets:
            sets[found.label] = step = _step(
                "calibrate",
                f"{model.label} {found.label}",
                {"model": model.identity, **found.decisive},
                {"model": who, **found.work},
                after=after,
            )
            yield step
    labels: dict[str, str] = {}
    for recipe in sweep.recipes:
        choices: Iterable[Calibration | None] = sweep.sets if sweep.learns(recipe) else (None,)
        for choice in choices:
            quantize = _quantize(model, who, recipe, choice, sets, devices, after)
            verify = _step("verify", quantize.title, {}, {"model": who}, (quantize,))
            yield quantize
            yield verify
            yield from scored(quantize.title, {}, (quantize, verify))
            many = len(sweep.sets) > 1 and choice is not None
            own = quantize.title.removeprefix(f"{model.label} ")
            labels[own] = f"{recipe.name}@{choice.label}" if many and choice else recipe.name
    report = _step(
        "report",
        model.label,
        {"labels": labels, "policy": sweep.policy, "tasks": sweep.spec.tasks},
        {
            "label": model.label,
            "labels": {"source": "", **labels},
            "scores": {own: {t: s.name for t, s in steps.items()} for own, steps in scores.items()},
            "tasks": list(sweep.spec.tasks),
            "groups": sweep.groups,
            "policy": sweep.policy,
        },
        tuple(step for steps in scores.values() for step in steps.values()),
    )
    yield replace(report, whatever=True)


def _quantize(
    model: Model,
    who: Mapping[str, Any],
    recipe: AnyRecipe,
    choice: Calibration | None,
    sets: Mapping[str, Step],
    devices: Devices,
    after: tuple[str, ...],
) -> Step:
    set_label = choice.label if choice else "no data"
    decisive = {
        "model": model.identity,
        "recipe": recipe.digest,
        "name": recipe.name,
        "device": devices.quantize,
        **({"ranks": devices.ranks} if devices.ranks > 1 else {}),
    }
    part = {k: choice.work.get(k) for k in ("samples", "length")} if choice else {}
    work = {
        "model": who,
        "recipe": recipe.public(),
        "gguf": isinstance(recipe, GGUFRecipe),
        "device": devices.quantize,
        "ranks": devices.ranks,
        **part,
    }
    return _step(
        "quantize",
        f"{model.label} {recipe.name}" + (f" {choice.label}" if choice else ""),
        decisive,
        work,
        (sets[choice.label],) if choice else (),
        after=() if choice else after,
        together=f"{model.label} {set_label}",
    )


def _step(
    kind: str,
    title: str,
    decisive: Mapping[str, Any],
    work: Mapping[str, Any],
    needs: tuple[Step, ...] = (),
    after: tuple[str, ...] = (),
    together: str = "",
) -> Step:
    with_what = {"versions": versions.of(kind)}
    digest = digest_of(kind, {**decisive, **with_what}, [step.digest for step in needs])
    names = tuple(step.name for step in needs)
    work = {**work, **with_what}
    return Step(kind, title, work, digest, names, False, after, f"{kind} {together or digest}")
