"""Errors of layers as a grid: blocks of the model by kinds of linear."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.score.scorecard import LayerError


@dataclass(frozen=True)
class Grid:
    """One value for each kind of linear in each block; None where there is none."""

    kinds: list[str]
    blocks: list[str]
    values: list[list[float | None]]
    is_output: bool
    """Errors of outputs, which only calibrated recipes know; otherwise of weights."""
    worst: str


def grid(layers: Mapping[str, LayerError]) -> Grid:
    """Layers by the number in their name and what comes after it, as `3` and `mlp.down_proj`."""
    is_output = all(layer.output is not None for layer in layers.values())
    errors = {
        name: layer.output if is_output and layer.output is not None else layer.weight
        for name, layer in layers.items()
    }
    placed: dict[tuple[str, str], float] = {}
    for name, error in errors.items():
        found = re.search(r"\.(\d+)\.(.+)$", name)
        block, kind = (found[1], found[2]) if found else ("", name)
        placed[kind.removesuffix(".weight"), block] = error
    kinds = list(dict.fromkeys(kind for kind, _ in placed))
    blocks = sorted({block for _, block in placed}, key=lambda b: int(b) if b else -1)
    worst = max(errors, key=lambda name: errors[name])
    return Grid(
        kinds,
        blocks,
        [[placed.get((kind, block)) for block in blocks] for kind in kinds],
        is_output,
        f"{worst} ({errors[worst]:.2g})",
    )
