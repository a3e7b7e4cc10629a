"""Each GPU's share of a checkpoint's weights, and whether GPUs can share it at all.

vLLM splits every layer (tensor parallel): queries, keys, values and the MLP's up projections by
rows, the down projections by columns, the vocabulary by tokens; norms are replicated. With fewer
key/value heads than GPUs, each GPU has a copy of one. In a pipeline the first stage has the
embeddings, the last the head and, if that is tied, the embeddings again. llama.cpp gives whole
layers to each GPU instead.
"""

import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from quantkit.advise import weights
from quantkit.advise.shape import EMBEDDINGS, ModelShape, Sample, at_block
from quantkit.advise.split import ONE, Split, SplitConstraint, stage_of_layers
from quantkit.families import geometry
from quantkit.model.architecture import EXPERT
from quantkit.model.headers import TensorSpec
from quantkit.model.source import EXPERTS
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe

VOCABULARY = re.compile(r"(embed_tokens|wte|lm_head)\.")
PADDED_TO = 64
"""vLLM pads the vocabulary to a multiple of this before splitting it."""
BY_COLUMNS = ("o_proj", "down_proj", "dense", "c_proj")
KEYS = ("k_proj", "v_proj")
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
"""Compression layers of latent attention, which are replicated on every GPU."""


def usual(recipe: AnyRecipe | None, n_gpus: int) -> Split:
    """The default split for several GPUs."""
    return Split(pipeline=n_gpus) if isinstance(recipe, GGUFRecipe) else Split(tensor=n_gpus)


def n_experts(shape: ModelShape) -> int:
    """Experts that each token chooses from; 0 in a dense model."""
    if "experts" not in shape.cache:
        has_any = any(EXPERT.search(tensor.name) for tensor in shape.thin[0].tensors)
        known = (shape.config.get(key) for key in EXPERTS)
        shape.cache["experts"] = int(next(filter(None, known), 0)) if has_any else 0
    return int(shape.cache["experts"])


def bytes_per_gpu(shape: ModelShape, recipe: AnyRecipe | None, n_gpus: int) -> int:
    """Bytes of weights on the fullest GPU with the default split; without a recipe, unquantised."""
    return max(stage_bytes(shape, recipe, usual(recipe, n_gpus)))


def stage_bytes(shape: ModelShape, recipe: AnyRecipe | None, split: Split) -> list[int]:
    """Bytes of weights on the fullest GPU of each stage; for llama.cpp, on the fullest alone."""
    key = "bytes", weights.digest(shape, recipe), split
    if key not in shape.cache:
        shape.cache[key] = _stage_bytes(shape, recipe, split)
    return list(shape.cache[key])


def _stage_bytes(shape: ModelShape, recipe: AnyRecipe | None, split: Split) -> list[int]:
    if isinstance(recipe, GGUFRecipe):
        by_layer, rest = _by_layers(shape, recipe)
        return [rest + fullest(by_layer, split.pipeline)]
    outside, alike = _kinds_of_tensors(shape, recipe)
    cut = weights.sample_of(shape, recipe).shape.architecture.linears
    # The first GPUs have one more if experts cannot be distributed evenly.
    held = -(-n_experts(shape) // split.tensor) if split.has_whole_experts else None
    tied = not any(spec.name == shape.head for spec in outside)
    sizes = [0] * split.pipeline
    for spec in outside:
        size = _share(spec, cut, shape.config, split.tensor)
        looked_up = any(part in spec.name for part in EMBEDDINGS)
        sizes[0 if looked_up else -1] += size
        if tied and spec.name == shape.embedding and split.pipeline > 1:
            sizes[-1] += size
    blocks: dict[Layers, int] = {}
    for spec, layers, n in alike:
        if held is not None and (expert := EXPERT.search(spec.name)):
            first = int(expert[0].split(".")[2])
            size = spec.size_bytes * max(0, min(held - first, n))
        else:
            size = n * _share(spec, cut, shape.config, split.tensor)
        blocks[layers] = blocks.get(layers, 0) + size
    if split.pipeline == 1:
        sizes[0] += sum(size * len(layers) for layers, size in blocks.items())
        return sizes
    for layers, size in blocks.items():
        for stage, n in _layers_of_stages(shape, layers, split.pipeline).items():
            sizes[stage] += n * size
    return sizes


def _layers_of_stages(shape: ModelShape, layers: "Layers", n_stages: int) -> Mapping[int, int]:
    """How many of these layers each stage has."""
    key = "stages", layers, n_stages
    if key not in shape.cache:
        stage_of = stage_of_layers(shape.config["num_hidden_layers"], n_stages)
        shape.cache[key] = Counter(stage_of.get(layer, -1) for layer in layers)
    found: Counter[int] = shape.cache[key]
    return found


Layers = tuple[int, ...]
Kinds = tuple[list[TensorSpec], list[tuple[TensorSpec, Layers, int]]]


def _kinds_of_tensors(shape: ModelShape, recipe: Recipe | None) -> Kinds:
    """Tensors outside layers, and one representative for each part that layers have in common, with
    those layers and its count in each.
    """
    key = "tensors", weights.digest(shape, recipe)
    if key not in shape.cache:
        sample = weights.sample_of(shape, recipe)
        plan = None if recipe is None else weights.plan(shape, recipe)
        specs = sample.shape.stored if plan is None else plan.specs
        if recipe is not None and plan is not None and plan.kv_scales:  # sorted after all others
            outside, alike = _kinds_of_tensors(shape, weights.without_cache(shape, recipe))
            more, other = _sorted_out(sample, specs[-len(plan.kv_scales) :])
            shape.cache[key] = [*outside, *more], [*alike, *other]
        else:
            shape.cache[key] = _sorted_out(sample, specs)
    found: Kinds = shape.cache[key]
    return found


def _sorted_out(sample: Sample, specs: Sequence[TensorSpec]) -> Kinds:
    outside, alike = [], []
    for spec in specs:
        if layers := sample.layers_of(spec.name):
            alike.append((spec, layers, sample.experts(spec.name)))
        else:
            outside.append(spec)
    return outside, alike


def _share(spec: TensorSpec, cut: Container[str], config: Mapping[str, Any], n_gpus: int) -> int:
    module, _, part = spec.name.rpartition(".")
    if VOCABULARY.search(spec.name) and len(spec.shape) == 2:
        return -(-_padded(spec.shape[0]) // n_gpus) * spec.size_bytes // spec.shape[0]
    # Per-tensor scales, and small tensors outside layers, are on every GPU.
    if module not in cut or spec.n_elements == 1 or part == "weight_shape":
        return spec.size_bytes
    last = module.rpartition(".")[2]
    if last in WHOLE:
        return spec.size_bytes
    heads = int(config.get("num_attention_heads") or n_gpus)
    n_kv = geometry.n_kv_heads(config)
    kept_kv = -(-n_kv // n_gpus)
    if last in BY_COLUMNS and (part == "bias" or spec.shape[1:] == (1,)):
        return spec.size_bytes  # one number per row, and every GPU has all rows
    if last in KEYS:
        return -(-spec.size_bytes * kept_kv // n_kv)
    if last == "qkv_proj":
        kept = -(-heads // n_gpus) + 2 * kept_kv
        return -(-spec.size_bytes * kept // (heads + 2 * n_kv))
    return -(-spec.size_bytes // n_gpus)


def _padded(n_words: int) -> int:
    return -(-n_words // PADDED_TO) * PADDED_TO


def _by_layers(shape: ModelShape, recipe: GGUFRecipe) -> tuple[list[int], int]:
    """Bytes of each layer, and of everything outside layers, which some GPU has to hold."""
    sizes = weights.gguf_tensors(shape, recipe)
    key = "layers", weights.digest(shape, recipe)
    if key not in shape.cache:
        layers = [0] * int(shape.config["num_hidden_layers"])
        for name, size in sizes.items():
            if (layer := layer_of(name)) is not None:
                layers[layer] += size
        shape.cache[key] = layers, sum(sizes.values()) - sum(layers)
    found: tuple[list[int], int] = shape.cache[key]
    return found


def layer_of(name: str) -> int | None:
    """The layer that a tensor of a GGUF file belongs to; None outside layers."""
    before, number, _ = at_block(name)
    return number if before == "blk" else None


def fullest(layers: Sequence[int], n_gpus: int) -> int:
    """Most bytes that a GPU can hold when each gets the same number of consecutive layers."""
    n = -(-len(layers) // n_gpus)
    return max(sum(layers[start : start + n]) for start in range(len(layers) - n + 1))


def obstacle(shape: ModelShape, recipe: AnyRecipe | None, split: Split) -> str:
    """Why GPUs cannot share the model with this split; empty if they can."""
    if split == ONE:
        return ""
    n_layers = shape.config["num_hidden_layers"]
    if n_layers < split.pipeline:
        return f"{n_layers} layers are fewer than {split.pipeline} GPUs"
    tensor, whole = split.tensor, split.has_whole_experts
    key = "obstacle", weights.digest(shape, recipe), tensor, whole
    if key not in shape.cache:
        shape.cache[key] = _obstacle(shape, recipe, Split(tensor, has_whole_experts=whole))
    return str(shape.cache[key])


def _obstacle(shape: ModelShape, recipe: AnyRecipe | None, split: Split) -> str:
    """The same without the rules for pipelines."""
    config, n_gpus = shape.config, split.tensor
    if isinstance(recipe, GGUFRecipe):
        cuts = n_gpus > 1 or split.has_whole_experts
        return "llama.cpp places whole layers on GPUs: no tensor parallel" if cuts else ""
    if split.has_whole_experts and not n_experts(shape):
        return "it has no experts to distribute"
    if split.has_whole_experts and n_gpus == 1:
        return "expert parallel needs tensor parallel over 2 or more GPUs"
    if n_gpus == 1:
        return ""
    heads = config["num_attention_heads"]
    n_kv = geometry.n_kv_heads(config)
    if heads % n_gpus:
        return f"{heads} heads cannot be divided over {n_gpus} GPUs"
    if n_kv % n_gpus and n_gpus % n_kv:
        return f"{n_kv} key heads cannot be divided over {n_gpus} GPUs"
    for inner, of in _widths(shape, split):
        if inner % n_gpus:
            return f"{of} of {inner} cannot be divided over {n_gpus} GPUs"
    if (n_words := _padded(config["vocab_size"])) % n_gpus:
        return f"a vocabulary of {n_words} cannot be divided over {n_gpus} GPUs"
    return "" if recipe is None else _tile_obstacle(shape, recipe, split)


def _widths(shape: ModelShape, split: Split) -> Iterator[tuple[int, str]]:
    """Inner widths of MLPs, as far as they are split."""
    found = {
        (columns, "an expert" if EXPERT.search(module) else "an MLP")
        for module, (_, columns) in shape.sample.shape.architecture.linears.items()
        if module.endswith("down_proj")
    }
    if not found and (inner := shape.config.get("intermediate_size")):
        found = {(int(inner), "an MLP")}
    for width, of in sorted(found):
        if of == "an MLP" or not split.has_whole_experts:
            yield width, of


def _tile_obstacle(shape: ModelShape, recipe: Recipe, split: Split) -> str:
    """Splits must fall between groups or blocks that share a scale."""
    scheme, n_gpus = weights.plan(shape, recipe).recipe.weights, split.tensor
    group = scheme.group_size if isinstance(scheme.group_size, int) else 0
    high, wide = scheme.block_structure or (1, group or 1)
    for (last, is_expert, rows, columns), module in _kinds(shape, recipe).items():
        if last in WHOLE or (split.has_whole_experts and is_expert):
            continue
        tile, size = (wide, columns) if last in BY_COLUMNS else (high, rows)
        ways = n_gpus
        if last in KEYS:
            ways = math.gcd(n_gpus, shape.config["num_key_value_heads"])
        if size % ways or (size // ways) % tile:
            return f"{module} of {rows} x {columns} cannot be split {ways} ways between its scales"
    return ""


def _kinds(shape: ModelShape, recipe: Recipe) -> dict[tuple[str, bool, int, int], str]:
    """One representative per group of modules that are split alike: an MoE model has thousands."""
    key = "kinds", weights.digest(shape, recipe)
    if key not in shape.cache:
        found: dict[tuple[str, bool, int, int], str] = {}
        for module, weight in weights.plan(shape, recipe).quantized.items():
            rows, columns = weight.shape
            is_expert = EXPERT.search(module) is not None
            found.setdefault((module.rpartition(".")[2], is_expert, rows, columns), module)
        shape.cache[key] = found
    return dict(shape.cache[key])


def ways_to_share(
    shape: ModelShape, recipe: AnyRecipe | None, count: int, constraint: SplitConstraint
) -> list[Split]:
    """Splits worth comparing, tensor parallel before pipelines; empty if there is none.

    They use as many GPUs as they can. If layers cannot be split over all of them, splits over fewer
    are included. Expert parallelism is used if experts cannot be split, or if it was requested.
    """
    key = "ways", weights.digest(shape, recipe), count, constraint
    if key not in shape.cache:
        shape.cache[key] = _ways(shape, recipe, count, constraint)
    return list(shape.cache[key])


def _ways(
    shape: ModelShape, recipe: AnyRecipe | None, count: int, constraint: SplitConstraint
) -> list[Split]:
    if isinstance(recipe, GGUFRecipe):
        whole = usual(recipe, count)
        return [whole] if constraint.allows(whole) and not obstacle(shape, recipe, whole) else []
    found = []
    # Heads and layers limit the split, however many GPUs there are.
    heads, n_layers = (shape.config[k] for k in ("num_attention_heads", "num_hidden_layers"))
    for tensor in range(min(count, heads), 0, -1):
        for pipeline in range(min(count // tensor, n_layers), 0, -1):
            plain = Split(tensor, pipeline)
            for split in (plain, Split(tensor, pipeline, has_whole_experts=True)):
                if constraint.allows(split) and not obstacle(shape, recipe, split):
                    found.append(split)
                    break
    most = max((split.n_gpus for split in found), default=0)
    widest = next((split for split in found if split.pipeline == 1), None)
    cuts_all = widest is not None and widest.n_gpus == count
    return [s for s in found if s.n_gpus == most or (s is widest and not cuts_all)]
