"""What each of several GPUs holds of a checkpoint's weights, and whether they can share it at all.

vLLM cuts every layer (tensor parallel): queries, keys, values and the MLP's way up by rows, the
way back by columns, vocabulary by tokens; norms are everywhere. Where there are fewer key heads
than GPUs, each GPU has a copy of one. llama.cpp gives whole layers to each GPU instead.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.advise import weights
from quantkit.advise.shape import ModelShape
from quantkit.model.headers import TensorSpec
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe

VOCABULARY = re.compile(r"(embed_tokens|wte|lm_head)\.")
PADDED_TO = 64
"""vLLM rounds the vocabulary up to a multiple of this before it is cut."""
BY_COLUMNS = ("o_proj", "down_proj", "dense", "c_proj")
KEYS = ("k_proj", "v_proj")
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
"""What latent attention compresses with, which every GPU has all of."""
BLOCK = re.compile(r"blk\.(\d+)\.")


def bytes_per_gpu(shape: ModelShape, recipe: AnyRecipe | None, n_gpus: int) -> int:
    """Bytes of weights on the fullest GPU; without a recipe, of the model as it is."""
    key = f"bytes {recipe and recipe.digest} {n_gpus}"
    if key not in shape.made:
        shape.made[key] = _bytes_per_gpu(shape, recipe, n_gpus)
    return int(shape.made[key])


def _bytes_per_gpu(shape: ModelShape, recipe: AnyRecipe | None, n_gpus: int) -> int:
    if isinstance(recipe, GGUFRecipe):
        return _by_layers(weights.gguf_tensors(shape, recipe), shape.config, n_gpus)
    stored = shape.stored if recipe is None else weights.specs(shape, recipe)
    cut = set(shape.architecture.linears)
    return sum(_share(spec, cut, shape.config, n_gpus) for spec in stored)


def _share(spec: TensorSpec, cut: set[str], config: Mapping[str, Any], n_gpus: int) -> int:
    module, _, part = spec.name.rpartition(".")
    if VOCABULARY.search(spec.name) and len(spec.shape) == 2:
        rows = -(-spec.shape[0] // PADDED_TO) * PADDED_TO
        return -(-rows // n_gpus) * spec.size_bytes // spec.shape[0]
    # One scale for all, and what is neither layer nor large, is on every GPU.
    if module not in cut or spec.n_elements == 1 or part == "weight_shape":
        return spec.size_bytes
    last = module.rpartition(".")[2]
    if last in WHOLE:
        return spec.size_bytes
    heads = int(config.get("num_attention_heads") or n_gpus)
    n_kv = int(config.get("num_key_value_heads") or heads)
    kept_kv = -(-n_kv // n_gpus)
    if last in BY_COLUMNS and (part == "bias" or spec.shape[1:] == (1,)):
        return spec.size_bytes  # one number a row, and every GPU has all rows
    if last in KEYS:
        return -(-spec.size_bytes * kept_kv // n_kv)
    if last == "qkv_proj":
        kept = -(-heads // n_gpus) + 2 * kept_kv
        return -(-spec.size_bytes * kept // (heads + 2 * n_kv))
    return -(-spec.size_bytes // n_gpus)


def _by_layers(sizes: Mapping[str, int], config: Mapping[str, Any], n_gpus: int) -> int:
    """Layers in a row, and all that lies outside of layers, which some GPU has to take."""
    layers = [0] * int(config["num_hidden_layers"])
    for name, size in sizes.items():
        if match := BLOCK.match(name):
            layers[int(match[1])] += size
    return sum(sizes.values()) - sum(layers) + fullest(layers, n_gpus)


def fullest(layers: Sequence[int], n_gpus: int) -> int:
    """The most that a GPU can have to hold when each gets as many layers in a row."""
    n = -(-len(layers) // n_gpus)
    return max(sum(layers[start : start + n]) for start in range(len(layers) - n + 1))


def obstacle(shape: ModelShape, recipe: AnyRecipe | None, n_gpus: int) -> str:
    """Why this many GPUs cannot share the model; empty where they can."""
    if n_gpus == 1:
        return ""
    key = f"obstacle {recipe and recipe.digest} {n_gpus}"
    if key not in shape.made:
        shape.made[key] = _obstacle(shape, recipe, n_gpus)
    return str(shape.made[key])


def _obstacle(shape: ModelShape, recipe: AnyRecipe | None, n_gpus: int) -> str:
    config = shape.config
    if isinstance(recipe, GGUFRecipe):
        layers = config["num_hidden_layers"]
        return f"{layers} layers are fewer than {n_gpus} GPUs" if layers < n_gpus else ""
    heads = config["num_attention_heads"]
    n_kv = config.get("num_key_value_heads") or heads
    if heads % n_gpus:
        return f"{heads} heads cannot be divided over {n_gpus} GPUs"
    if n_kv % n_gpus and n_gpus % n_kv:
        return f"{n_kv} key heads cannot be divided over {n_gpus} GPUs"
    inner = config.get("intermediate_size")
    if inner and inner % n_gpus:
        return f"an MLP of {inner} cannot be divided over {n_gpus} GPUs"
    return "" if recipe is None else _tile_obstacle(shape, recipe, n_gpus)


def _tile_obstacle(shape: ModelShape, recipe: Recipe, n_gpus: int) -> str:
    """Cuts must fall between groups or blocks that share a scale."""
    plan = weights.plan(shape, recipe)
    scheme = plan.recipe.weights
    group = scheme.group_size if isinstance(scheme.group_size, int) else 0
    high, wide = scheme.block_structure or (1, group or 1)
    for module, weight in plan.quantized.items():
        rows, columns = weight.shape
        last = module.rpartition(".")[2]
        if last in WHOLE:
            continue
        tile, size = (wide, columns) if last in BY_COLUMNS else (high, rows)
        ways = n_gpus
        if last in KEYS:
            ways = math.gcd(n_gpus, shape.config["num_key_value_heads"])
        if size % ways or (size // ways) % tile:
            return f"{module} of {rows} x {columns} cannot be cut into {ways} between its scales"
    return ""
