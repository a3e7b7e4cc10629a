"""Compares what another engine produced with the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quantkit import formats
from quantkit.errors import MethodError
from quantkit.model.shards import CODES, TensorSpec
from quantkit.model.source import ModelSource
from quantkit.plan.checkpoint import Plan


@dataclass(frozen=True)
class Fold:
    """One input scale: columns of the readers were multiplied, the feeder's output divided."""

    feeder: str
    readers: list[str]
    scale: torch.Tensor


@dataclass(frozen=True)
class EngineOutput:
    """What the engine left in memory."""

    state: dict[str, torch.Tensor]
    """Every parameter by name, quantised layers in compressed-tensors format."""
    folds: list[Fold] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    """Layers that were rounded to nearest because GPTQ failed on them."""


def folded_scales(folds: Sequence[Fold], plan: Plan) -> dict[str, torch.Tensor]:
    """Folds by the names that `verify` looks for."""
    specs = {spec.name: spec for spec in plan.specs}
    scales: dict[str, torch.Tensor] = {}

    def fold(name: str, scale: torch.Tensor) -> None:
        scales[name] = scales[name] * scale if name in scales else scale

    for found in folds:
        weight = plan.quantized.get(found.feeder) or specs[f"{found.feeder}.weight"]
        # Where q, k and v are one layer, its last rows are the values, which feed the output.
        out = torch.ones(weight.shape[0])
        out[-len(found.scale) :] = found.scale
        if found.feeder in plan.quantized:
            fold(f"{found.feeder}.out_scale", out)
        else:
            fold(f"{found.feeder}.weight.folded", out if len(weight.shape) == 1 else out[:, None])
        if f"{found.feeder}.bias" in specs:
            fold(f"{found.feeder}.bias.folded", out)
        for reader in found.readers:
            if reader in plan.quantized:
                fold(f"{reader}.in_scale", found.scale)
            else:  # a router: multiplied, where a feeder is divided
                fold(f"{reader}.weight.folded", 1 / found.scale)
    return scales


def compare(
    state: Mapping[str, torch.Tensor],
    plan: Plan,
    source: ModelSource,
    scales: Mapping[str, torch.Tensor],
) -> None:
    """Check that the engine produced what the plan promises, and that the rest is untouched."""
    problems = []
    untouched = others(plan)
    for spec in plan.specs:
        made = state.get(spec.name)
        if made is None:
            if spec.name not in untouched:
                problems.append(f"{spec.name} is missing")
        elif spec.name not in untouched:
            found = (CODES.get(made.dtype, str(made.dtype)), tuple(made.shape))
            if found != (spec.dtype, spec.shape):
                wanted = f"{spec.dtype} {list(spec.shape)}"
                problems.append(f"{spec.name} is {found[0]} {list(found[1])}, not {wanted}")
        elif f"{spec.name}.folded" not in scales:
            original = source.tensors[spec.name].read().to(made.dtype)
            # As bytes: NaN is a separate fault, found when the tensor is copied.
            copies = [t.reshape(-1).view(torch.uint8) for t in (original, made.cpu())]
            if original.shape != made.shape or not torch.equal(*copies):
                problems.append(f"{spec.name} changed silently")
    problems += [f"{name} is not in the plan" for name in state if name not in plan.names]
    if problems:
        rest = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise MethodError(
            f"llm-compressor's checkpoint of {plan.recipe.name} differs from the plan: "
            f"{'; '.join(problems[:3])}{rest}"
        )


def others(plan: Plan) -> dict[str, TensorSpec]:
    """Tensors of the result that do not belong to a quantised layer."""
    parts = {
        part.name
        for module, weight in plan.quantized.items()
        for part in formats.specs(module, weight, plan.recipe)
    }
    return {spec.name: spec for spec in plan.specs if spec.name not in parts}
