"""Errors of layers as a grid: blocks of the model by kinds of linear."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.scoring.scorecard import LayerError

FAR_OFF = 1e6
"""Stands for an infinite ratio, where others have no error at all."""
BLOCK = re.compile(r"\.(\d+)\.(.+?)(?:\.weight)?$")


@dataclass(frozen=True)
class Grid:
    """One value per kind of linear and block; None where there is none."""

    kinds: list[str]
    blocks: list[str]
    values: list[list[float | None]]
    is_output: bool
    """Output errors, which only calibrated recipes know; otherwise weight errors."""
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
    """Layers by block number and kind; of many experts the worst counts."""
    errors, is_output = _errors(layers)
    placed: dict[tuple[str, str], float] = {}
    outside = []
    for name, error in errors.items():
        if (place := _place(name)) is None:
            outside.append(f"{name} {error:.2g}")
        else:
            placed[place] = max(error, placed.get(place, error))
    kinds = list(dict.fromkeys(kind for _, kind in placed))
    blocks = sorted({block for block, _ in placed}, key=int)
    short = [kind.rpartition(".")[2] for kind in kinds]
    return Grid(
        short if len(set(short)) == len(short) else kinds,
        blocks,
        [[placed.get((block, kind)) for block in blocks] for kind in kinds],
        is_output,
        f"Outside the blocks: {', '.join(outside)}." if outside else "",
    )


def outliers(layers: Mapping[str, LayerError]) -> dict[tuple[str, str], float]:
    """Each layer's error as a multiple of the median for its kind, by block and kind.

    Errors, not their squares: output errors are stored as squares.
    """
    errors, is_output = _errors(layers)
    members: dict[str, list[tuple[str, float]]] = {}
    for name, error in errors.items():
        if (place := _place(name)) is not None:
            members.setdefault(place[1], []).append((place[0], error))
    times: dict[tuple[str, str], float] = {}
    for kind, found in members.items():
        for index, (block, error) in enumerate(found):
            others = [e for i, (_, e) in enumerate(found) if i != index]
            if not others:
                continue
            median = statistics.median(others)
            ratio = error / median if median > 0 else (1.0 if error == 0 else FAR_OFF)
            ratio = min(ratio, FAR_OFF) if math.isfinite(ratio) else FAR_OFF
            ratio = math.sqrt(ratio) if is_output else ratio
            times[block, kind] = max(ratio, times.get((block, kind), 0.0))
    return times


def _place(name: str) -> tuple[str, str] | None:
    """A layer's block and kind, such as `3` and `mlp.experts.down_proj`; None outside the
    blocks.
    """
    found = BLOCK.search(name)
    return (found[1], re.sub(r"\.\d+(?=\.)", "", found[2])) if found else None


def _errors(layers: Mapping[str, LayerError]) -> tuple[dict[str, float], bool]:
    """Output errors where all are known, otherwise weight errors."""
    outputs = {name: layer.output for name, layer in layers.items() if layer.output is not None}
    if len(outputs) == len(layers):
        return outputs, True
    return {name: layer.weight for name, layer in layers.items()}, False
