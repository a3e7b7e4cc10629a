"""What vLLM would refuse about a planned checkpoint, by its own rules (`dispatch/`).

Which formats a GPU runs is in `hardware/support.py`; this module checks the layers of one model:
blocks that do not divide fused layers, sizes that no kernel supports.
"""

from typing import Any

from quantkit import families, formats
from quantkit.advise import parallel, weights
from quantkit.advise.shape import ModelShape, at_block
from quantkit.dispatch import prediction
from quantkit.errors import RecipeError
from quantkit.hardware import support
from quantkit.hardware.gpus import GPU
from quantkit.model.headers import TensorSpec
from quantkit.recipe import AnyRecipe, Recipe

OWN = ("config-shape", "headers", "family-gone", "deepseek-v4")
"""Rules about the model itself, whatever is made from it."""
UNSERVED = ("gpt-oss-experts",)
"""Rules about what vLLM loads without complaint but does not compute."""


def refusal(shape: ModelShape, recipe: AnyRecipe | None, gpu: GPU) -> str | None:
    """Why quantkit or vLLM would refuse it on a GPU; None if it loads, or if that is unknown."""
    is_other = isinstance(recipe, Recipe) and gpu.capability is None
    if is_other and families.experts_note(shape.config):
        return "vLLM reads the experts of this family in MXFP4 or in 16 bits only"
    if isinstance(recipe, Recipe) and gpu.vendor == "cpu" and parallel.n_experts(shape):
        is_fp8 = support.format_of(recipe).startswith("fp8")
        return "vLLM's kernels for FP8 experts on CPUs need AMX" if is_fp8 else None
    if not isinstance(recipe, Recipe) or gpu.capability is None:
        return None
    key = f"refusal {weights.digest(shape, recipe)} {gpu.capability}"
    if key not in shape.cache:
        shape.cache[key] = _refusal(shape, recipe, gpu)
    found: str | None = shape.cache[key]
    return found


def _refusal(shape: ModelShape, recipe: Recipe, gpu: GPU) -> str | None:
    try:
        config, specs = _to_be(shape, recipe)
    except RecipeError as error:
        return str(error).removeprefix(f"recipe {recipe.name}: ")
    for one in prediction.of_tensors(config, specs, gpu=gpu).faults:
        if one.rule.id in OWN:
            continue
        if one.consequence == "refuses":
            return f"vLLM would refuse it: {one.layer}: {one.words}"
        if one.rule.id in UNSERVED:
            return f"vLLM would answer nonsense: {one.layer}: {one.words}; {one.rule.remedy}"
    return None


def _to_be(shape: ModelShape, recipe: Recipe) -> tuple[dict[str, Any], list[TensorSpec]]:
    """What vLLM would read on any GPU: the config, and the layers' tensors."""
    key = "to be", weights.digest(shape, recipe)
    if key not in shape.cache:
        plan = weights.plan(shape, recipe)
        config = {**shape.config, "quantization_config": formats.config(plan.recipe, plan.ignore)}
        # An FP8 cache adds no tensor to a layer: both plans share one dict.
        layers = "unlike", id(plan.quantized)
        if layers not in shape.cache:
            linears = {*plan.quantized, *plan.ignored}
            specs = [spec for spec in plan.specs if spec.name.rpartition(".")[0] in linears]
            shape.cache[layers] = _unlike(specs)
        shape.cache[key] = config, shape.cache[layers]
    found: tuple[dict[str, Any], list[TensorSpec]] = shape.cache[key]
    return found


def _unlike(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Tensors of one block of each kind."""
    blocks: dict[int | None, tuple[list[tuple[Any, ...]], list[TensorSpec]]] = {}
    for spec in specs:
        before, number, rest = at_block(spec.name)
        kinds, held = blocks.setdefault(number, ([], []))
        kinds.append((before, rest, spec.dtype, spec.shape))
        held.append(spec)
    unlike = {tuple(kinds): held for kinds, held in reversed(blocks.values())}
    return [spec for held in unlike.values() for spec in held]
