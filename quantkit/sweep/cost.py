"""What a sweep will cost before it starts: hours of GPUs or of this machine, and bytes.

Computed from shapes, as for a single run; scoring from the length of a task's first questions. What
cannot be known without data that is missing here is left open, and totals then say `at least`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from quantkit.advise import shape as shapes
from quantkit.advise.shape import ModelShape
from quantkit.advise.weights import weight_bytes
from quantkit.calibration.build import CHARACTERS_PER_TOKEN
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import HardwareError, QuantkitError
from quantkit.hardware import gpus
from quantkit.model.source import context_of
from quantkit.onepass.estimate import EFFICIENCY, estimate, measured_speeds
from quantkit.plan import checkpoint as planning
from quantkit.recipe import AnyRecipe, Recipe
from quantkit.scoring import lmeval
from quantkit.sweep.graph import Graph, Step
from quantkit.sweep.resolve import Resolved

LARGE_PRODUCT = 0.8
"""Share of its printed rate at which an H200 multiplies large matrices: 790 of 989 TFLOP/s."""
FLOAT32 = 1 / 15
"""Rate in float32 relative to that of tensor cores; 67 to 989 TFLOP/s on an H200."""
SCORING = 0.28
"""Share of the printed rate that scoring a text reaches: benchmarks/results/scoring-h200.json."""
REFERENCE_BYTES = 388
"""Bytes stored of a source's predictions per token of text."""
LOOKED_AT = 16
"""Documents of a task from which the length of the others is estimated."""


@dataclass(frozen=True)
class Cost:
    """The cost of one step; None where it cannot be known."""

    seconds: float | None
    size_bytes: int | None
    on_gpu: bool


@dataclass(frozen=True)
class Costs:
    """The cost of all steps, by name, and the device it was computed for."""

    steps: Mapping[str, Cost]
    gpu: str


def disk_bytes(sweep: Resolved, steps: Iterable[Step]) -> int:
    """Bytes of the checkpoints that steps make; a model of unknown shape counts as zero."""
    total = 0
    for step in steps:
        shape, recipe = _shape(step.work["model"]["place"]), _named(sweep, step)
        with suppress(QuantkitError):  # the pass itself asks again, and reports what is wrong
            total += weight_bytes(shape, recipe, sweep.learns(recipe)) if shape else 0
    return total


def costs(sweep: Resolved, graph: Graph) -> Costs:
    """What every step of a sweep takes."""
    gpu = gpus.find(sweep.spec.gpu)
    peak = (gpu.fp16_tflops or 0) * 1e12
    if not peak:
        raise HardwareError(f"gpu: the compute rate of {gpu.name} is unknown")
    found: dict[str, Cost] = {}
    passes: dict[str, list[Step]] = defaultdict(list)
    for step in graph.steps.values():
        if step.kind == "quantize":
            passes[step.together].append(step)
        elif step.kind == "score":
            found[step.name] = _scoring(step, peak)
        else:
            found[step.name] = Cost(0.0, _set_bytes(step), on_gpu=False)
    for steps in passes.values():
        found |= _pass(sweep, graph, steps, peak)
    return Costs(found, gpu.name)


def _pass(sweep: Resolved, graph: Graph, steps: list[Step], peak: float) -> dict[str, Cost]:
    """One pass; its time is shared by its recipes."""
    work = steps[0].work
    on_gpu = work["device"] == "cuda"
    shape = _shape(work["model"]["place"])
    if shape is None:
        return {step.name: Cost(None, None, on_gpu) for step in steps}
    recipes = {step.name: _named(sweep, step) for step in steps}
    learning = [r for r in recipes.values() if isinstance(r, Recipe) and r.needs_calibration]
    seconds = 0.0  # without data a pass is one read of the weights
    if steps[0].needs:
        tokens = _tokens(graph.steps[steps[0].needs[0]], shape)
        plans = [planning.make(shape.architecture, shape.stored, recipe) for recipe in learning]
        device = torch.device("cuda" if on_gpu else "cpu")
        speeds = (LARGE_PRODUCT * peak, FLOAT32 * peak) if on_gpu else _here()
        seconds = estimate(shape.architecture, plans, tokens, device, speeds=speeds).seconds
    return {
        name: Cost(seconds / len(steps), weight_bytes(shape, recipe, bool(steps[0].needs)), on_gpu)
        for name, recipe in recipes.items()
    }


def _scoring(step: Step, peak: float) -> Cost:
    work = step.work
    on_gpu, shape = work["device"] == "cuda", _shape(work["model"]["place"])
    asked = _questions(work["task"], work["limit"])
    if shape is None or asked is None:
        return Cost(None, None, on_gpu)
    speed = SCORING * peak if on_gpu else EFFICIENCY * _here()[0]
    size = asked.n_tokens * REFERENCE_BYTES if asked.is_text and not step.needs else 0
    return Cost(2.0 * shape.n_parameters * asked.n_tokens / speed, size, on_gpu)


def _set_bytes(step: Step) -> int:
    if step.kind != "calibrate":
        return 0
    spec = step.work.get("spec")
    return 4 * spec["n_samples"] * spec["max_length"] if spec else 0


def _tokens(step: Step, shape: ModelShape) -> CalibrationTokens:
    """Dummy tokens, as many as a set will have."""
    work: Mapping[str, Any] = step.work
    if "folder" in work:
        from pathlib import Path

        from quantkit.calibration import calibration_set

        manifest = calibration_set.read_manifest(Path(work["folder"]))
        n, length = work["samples"] or manifest.n_samples, work["length"] or manifest.length
    else:
        n, length = work["spec"]["n_samples"], work["spec"]["max_length"]
    length = min(length, context_of(shape.config))
    return CalibrationTokens("", torch.zeros((), dtype=torch.long).expand(n, length))


def _named(sweep: Resolved, step: Step) -> AnyRecipe:
    return next(r for r in sweep.recipes if r.name == step.work["recipe"]["name"])


@dataclass(frozen=True)
class _TaskSize:
    n_tokens: int
    is_text: bool
    """Scored whole, with the source's predictions stored."""


@cache
def _questions(task: str, limit: int | None) -> _TaskSize | None:
    """The size of a task; None where its data is not available."""
    try:
        with lmeval.quiet():
            loaded = lmeval.load([task], None)["tasks"][task]
            n_documents = len(loaded.eval_docs)
            loaded.build_all_requests(limit=LOOKED_AT, rank=0, world_size=1)
            requests = list(loaded.instances)
    except Exception:  # whatever a task's own code raises: an estimate stops nothing
        return None
    contexts = {}
    characters = 0
    for request in requests:
        first, *rest = (str(part) for part in request.args[:2])
        contexts[request.doc_id, first] = len(first)
        characters += sum(map(len, rest))
    looked_at = max(1, len({request.doc_id for request in requests}))
    n = min(limit or n_documents, n_documents)
    characters += sum(contexts.values())
    is_text = bool(requests) and requests[0].request_type == "loglikelihood_rolling"
    return _TaskSize(int(characters / CHARACTERS_PER_TOKEN * n / looked_at), is_text)


@cache
def _shape(place: str) -> ModelShape | None:
    try:
        return shapes.of(place)
    except QuantkitError:
        return None


@cache
def _here() -> tuple[float, float]:
    return measured_speeds(torch.device("cpu"))
