"""Errors of layers as a grid: blocks of the model by kinds of linear."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.score.scorecard import LayerError

BLOCK = re.compile(r"\.(\d+)\.(.+?)(?:\.weight)?$")


@dataclass(frozen=True)
class Grid:
    """One value for each kind of linear in each block; None where there is none."""

    kinds: list[str]
    blocks: list[str]
    values: list[list[float | None]]
    is_output: bool
    """Errors of outputs, which only calibrated recipes know; otherwise of weights."""
    outside: str
    """Layers outside the blocks, in words."""


@dataclass(frozen=True)
class Worst:
    """One layer of one candidate."""

    candidate: str
    layer: str
    error: float
    what: str


def ranked(candidate: str, layers: Mapping[str, LayerError]) -> list[Worst]:
    """All layers, the worst first."""
    errors, is_output = _errors(layers)
    what = "output" if is_output else "weight"
    order = sorted(errors, key=lambda name: -errors[name])
    return [Worst(candidate, name, errors[name], what) for name in order]


def grid(layers: Mapping[str, LayerError]) -> Grid:
    """Layers by the number in their name and the last part of it, as `3` and `down_proj`."""
    errors, is_output = _errors(layers)
    placed: dict[tuple[str, str], float] = {}
    outside = []
    for name, error in errors.items():
        if found := BLOCK.search(name):
            placed[found[2].rpartition(".")[2], found[1]] = error
        else:
            outside.append(f"{name} {error:.2g}")
    kinds = list(dict.fromkeys(kind for kind, _ in placed))
    blocks = sorted({block for _, block in placed}, key=int)
    return Grid(
        kinds,
        blocks,
        [[placed.get((kind, block)) for block in blocks] for kind in kinds],
        is_output,
        f"Outside the blocks: {', '.join(outside)}." if outside else "",
    )


def outliers(layers: Mapping[str, LayerError]) -> dict[tuple[str, str], float]:
    """How many times as far off each layer is as the median of its kind, by block and kind.

    Of errors themselves: those of outputs are kept as squares.
    """
    found = grid(layers)
    times = {}
    for kind, row in zip(found.kinds, found.values, strict=True):
        known = [value for value in row if value is not None]
        median = statistics.median(known) if known else 0.0
        for block, value in zip(found.blocks, row, strict=True):
            if value is not None and median > 0:
                ratio = value / median
                times[block, kind] = math.sqrt(ratio) if found.is_output else ratio
    return times


def _errors(layers: Mapping[str, LayerError]) -> tuple[dict[str, float], bool]:
    """Errors of outputs where all are known, otherwise of weights."""
    outputs = {name: layer.output for name, layer in layers.items() if layer.output is not None}
    if len(outputs) == len(layers):
        return outputs, True
    return {name: layer.weight for name, layer in layers.items()}, False
