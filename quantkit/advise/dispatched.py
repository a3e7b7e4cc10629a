"""What vLLM would refuse of a checkpoint to be, by its own rules (`dispatch/`), before it is made.

Which formats a GPU runs stands in `hardware/support.py`; here the layers of this model are looked
at: blocks that do not divide fused layers, sizes that no kernel takes.
"""

import re

from quantkit import formats
from quantkit.advise import weights
from quantkit.advise.shape import ModelShape
from quantkit.dispatch import prediction
from quantkit.hardware.gpus import GPU
from quantkit.model.headers import TensorSpec
from quantkit.recipe import AnyRecipe, Recipe

OWN = ("config-shape", "headers", "family-gone")
"""Rules about a model as it is, whatever is made of it."""
BLOCK = re.compile(r"\.(\d+)\.")


def refusal(shape: ModelShape, recipe: AnyRecipe | None, gpu: GPU) -> str | None:
    """Why vLLM would refuse the result on a GPU; None if it loads, or if that is unknown."""
    if not isinstance(recipe, Recipe) or gpu.capability is None:
        return None
    key = f"refusal {weights.digest(shape, recipe)} {gpu.capability}"
    if key not in shape.made:
        shape.made[key] = _refusal(shape, recipe, gpu)
    found: str | None = shape.made[key]
    return found


def _refusal(shape: ModelShape, recipe: Recipe, gpu: GPU) -> str | None:
    plan = weights.plan(shape, recipe)
    config = {**shape.config, "quantization_config": formats.config(plan.recipe, plan.ignored)}
    linears = {*plan.quantized, *plan.ignored}
    specs = [spec for spec in plan.specs if spec.name.rpartition(".")[0] in linears]
    for one in prediction.foretell(config, _unlike(specs), gpu=gpu).faults:
        if one.consequence == "refuses" and one.rule.id not in OWN:
            return f"vLLM would refuse it: {one.layer}: {one.words}"
    return None


def _unlike(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Tensors of blocks that differ from each other, one block of each kind."""
    blocks: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        found = BLOCK.search(spec.name)
        blocks.setdefault(found[1] if found else "", []).append(spec)
    kinds = {
        tuple((BLOCK.sub(".", s.name, count=1), s.dtype, s.shape) for s in held): held
        for held in reversed(blocks.values())
    }
    return [spec for held in kinds.values() for spec in held]
