"""A choice of formats as a recipe: to be read, edited, kept in version control and run again."""

import json
from collections.abc import Sequence
from typing import Any

from quantkit.mixed import candidates, units
from quantkit.mixed.candidates import SIXTEEN, Candidate
from quantkit.mixed.table import Table
from quantkit.mixed.units import Unit
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe

FILE = "recipe.yaml"
OPTIONS: dict[str, dict[str, Any]] = {
    "int": {"sweeps": 2, "signed": True},
    "float": {"held_out": True},
}
"""GPTQ's options, as in the recipes that ship."""


def recipe(table: Table, choice: Sequence[int], name: str, summary: str) -> Recipe | None:
    """The recipe of a choice; None where everything stays in 16 bits."""
    chosen: dict[str, list[Unit]] = {}
    n_weights: dict[str, int] = {}
    for row, place in zip(table.units, choice, strict=True):
        format = table.formats[place]
        chosen.setdefault(format, []).append(Unit(row.name, tuple(row.modules)))
        n_weights[format] = n_weights.get(format, 0) + row.n_weights
    kept = chosen.pop(SIXTEEN, [])
    if not chosen:
        return None
    # The first scheme's method decides for the whole pass, so that of most weights comes first.
    found = {format: candidates.find(format) for format in chosen}
    order = sorted(found, key=lambda f: (not found[f].by_gptq, -n_weights[f]))
    base = found[order[0]]
    data: dict[str, Any] = {
        "name": name,
        "summary": summary,
        **_numbers(base),
        "groups": [
            {"targets": units.patterns(chosen[format]), **_numbers(found[format], base)}
            for format in order[1:]
        ],
        "unquantised": units.patterns(kept),
    }
    if base.by_gptq:
        data["options"] = OPTIONS[base.weights.type if base.weights else "int"]
    return Recipe.validated(data, name)


def _numbers(candidate: Candidate, base: Candidate | None = None) -> dict[str, Any]:
    assert candidate.weights is not None
    found: dict[str, Any] = {}
    if base is None or candidate.method != base.method:
        found["method"] = candidate.method
    found["weights"] = _plain(candidate.weights.model_dump(mode="json"))
    if candidate.activations is not None:
        found["input_activations"] = _plain(candidate.activations.model_dump(mode="json"))
    return found


def _plain(scheme: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in scheme.items() if value is not None}


def text(made: AnyRecipe, comments: Sequence[str]) -> str:
    """The file: comments, then the recipe with one line per number type."""
    lines = [f"# {line}".rstrip() for line in comments]
    lines += [f"name: {made.name}", f"summary: {json.dumps(made.summary)}"]
    if isinstance(made, GGUFRecipe):
        lines.append(f"gguf: {made.gguf}")
        lines += [f"method: {made.method}"] if made.method is not None else []
        lines.append("tensors:")
        lines += [f"  {json.dumps(pattern)}: {kind}" for pattern, kind in made.tensors.items()]
        return "\n".join(lines) + "\n"
    lines += [f"method: {made.method}", f"weights: {_flow(made.weights)}"]
    if made.input_activations is not None:
        lines.append(f"input_activations: {_flow(made.input_activations)}")
    if made.groups:
        lines.append("groups:")
    for group in made.groups:
        lines += ["  - targets:", *(f"      - {json.dumps(t)}" for t in group.targets)]
        if group.method is not None:
            lines.append(f"    method: {group.method}")
        lines.append(f"    weights: {_flow(group.weights)}")
        if group.input_activations is not None:
            lines.append(f"    input_activations: {_flow(group.input_activations)}")
    if made.unquantised:
        lines += ["unquantised:", *(f"  - {json.dumps(t)}" for t in made.unquantised)]
    if made.options:
        lines.append(f"options: {json.dumps(made.options)}")
    return "\n".join(lines) + "\n"


def _flow(scheme: Any) -> str:
    found = _plain(scheme.model_dump(mode="json"))
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in found.items()) + "}"
