"""Terminal output of `quantkit verify --for ENGINE`."""

from typing import TYPE_CHECKING

import typer

from quantkit.cli import console
from quantkit.errors import Faulty

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.dispatch.prediction import Prediction

MOST = 12
"""Findings shown per rule; --json has all."""


def end(found: "Sequence[Prediction]", as_json: bool) -> None:
    """Print the findings and, as the last line, a verdict; exit code 1 for a fault."""
    if as_json:
        data = [one.to_json() for one in found]
        console.print_json(data[0] if len(data) == 1 else data)
    else:
        for one in found:
            _show(one, len(found) > 1)
        console.say(f"verdict: {'; '.join(dict.fromkeys(one.verdict for one in found))}")
    if wrong := [one for one in found if not one.ok]:
        n = sum(len(one.faults) for one in wrong)
        names = ", ".join(str(one.path) for one in wrong)
        raise Faulty(f"{names}: {n} fault{'s' * (n > 1)} for {_engine(wrong[0])}")


def _engine(found: "Prediction") -> str:
    from quantkit.engine import label

    where = f" on {found.gpu}" if found.gpu else ""
    return f"{label(found.engine)} {found.version}".strip() + where


def _show(found: "Prediction", many: bool) -> None:
    typer.echo(f"{found.path}: {_engine(found)}" if many else _engine(found))
    kernels: dict[tuple[str, str], list[str]] = {}
    for choice in found.kernels:
        key = (choice.kernel or "no kernel", choice.scheme.tag)
        kernels.setdefault(key, []).append(choice.layer)
    for (kernel, tag), layers in kernels.items():
        # vLLM loads q, k and v as one layer, so these are fewer than a checkpoint's own.
        fused = f"{_layers(len(layers))} (as vLLM fuses them)"
        console.say(f"kernel    {kernel}: {fused} of {tag}", hang=10)
    if not found.kernels:
        for tag, n in found.schemes.items():
            console.say(f"scheme    {tag}: {_layers(n)}", hang=10)
    for words in found.left_out:
        console.say(f"left out  {words}", hang=10)
    shown: dict[str, int] = {}
    for one in found.findings:
        shown[one.rule.id] = shown.get(one.rule.id, 0) + 1
        if shown[one.rule.id] > MOST:
            continue
        mark = f"{one.consequence:<10}"
        console.say(f"{mark}{one.layer}: {one.words}", hang=10)
        if shown[one.rule.id] == 1:
            console.say(f"          rule {one.rule.id}: {one.rule.remedy}", hang=10)
    for name, n in shown.items():
        if n > MOST:
            console.say(f"          {n - MOST} more by rule {name}: --json lists them", hang=10)


def _layers(n: int) -> str:
    return "1 layer" if n == 1 else f"{n} layers"
