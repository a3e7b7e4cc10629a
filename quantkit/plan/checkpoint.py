"""What a run will write, planned before any weight is read."""

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from quantkit import families, formats
from quantkit.errors import RecipeError
from quantkit.model.architecture import EXPERT, Architecture
from quantkit.model.headers import TensorSpec
from quantkit.model.source import ModelSource
from quantkit.recipe import Recipe
from quantkit.recipe.checkpoint import HEAD, HEAD_GROUP

# vLLM loads each of these as one layer, so its parts must be quantised alike.


@dataclass(frozen=True)
class Plan:
    """One planned checkpoint: its recipe with every choice made, and its exact tensors."""

    recipe: Recipe
    asked_digest: str
    """The digest of the recipe before its open choices were made."""
    quantized: dict[str, TensorSpec]
    """Modules to quantise, with each one's weight in the source."""
    ignored: list[str]
    """Linear layers and routers that stay unquantised, by their names in files."""
    specs: list[TensorSpec]
    """Every tensor of the result, in order."""
    kv_scales: list[TensorSpec]
    """Scales of keys and values among them; empty without `kv_cache`."""
    n_parameters: int
    """Weights of the model, tied ones counted once."""
    unquantised: dict[str, TensorSpec] = field(default_factory=dict)
    """Modules that the recipe keeps in 16 bits by choice."""
    also_ignored: list[str] = field(default_factory=list)
    """transformers' names of the ignored layers, where they differ: its loader knows no others."""
    notes: list[str] = field(default_factory=list)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the result."""
        return frozenset(spec.name for spec in self.specs)

    @property
    def ignore(self) -> list[str]:
        """What the checkpoint's config tells loaders to leave alone."""
        return [*self.ignored, *self.also_ignored]

    @property
    def kv_shape(self) -> tuple[int, ...] | None:
        """Shape of one of `kv_scales`: one number, or one per head."""
        return self.kv_scales[0].shape if self.kv_scales else None

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self.specs)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over the model's weights, including everything that stayed in 16 bits."""
        return 8 * self.size_bytes / self.n_parameters

    @property
    def quantized_bits_per_weight(self) -> float:
        """The same for the layers that the recipe targets: what it promises."""
        stored = {spec.name: spec for spec in self.specs}
        size = sum(
            stored[part.name].size_bytes
            for module, weight in self.quantized.items()
            for part in formats.specs(module, weight, self.recipe)
        )
        size += sum(weight.size_bytes for weight in self.unquantised.values())
        weights = [*self.quantized.values(), *self.unquantised.values()]
        return 8 * size / sum(weight.n_elements for weight in weights)


def make(architecture: Architecture, stored: list[TensorSpec], recipe: Recipe) -> Plan:
    """Match a recipe with a model's tensors."""
    by_name = {spec.name: spec for spec in stored}
    every = [
        name
        for name in architecture.matching(recipe.targets, recipe.ignore)
        if f"{name}.weight" in by_name
    ]
    kept = set(architecture.matching(recipe.unquantised, recipe.ignore))
    modules = [name for name in every if name not in kept]
    if not modules:
        raise RecipeError(
            f"recipe {recipe.name}: targets {recipe.targets} match no layer of this model"
        )
    _check_head(recipe, architecture, modules)
    _check_fused(recipe, architecture, set(modules))
    _check_experts(recipe, modules)
    _check_shapes(recipe, architecture, modules)
    resolved, word = recipe.resolved({name: architecture.linears[name][1] for name in modules})
    _check_blocks(recipe, architecture, modules)
    quantized = {name: by_name[f"{name}.weight"] for name in modules}
    rowless = _rowless(architecture, quantized, resolved)
    quantized = {name: weight for name, weight in quantized.items() if name not in rowless}
    replaced = {weight.name: name for name, weight in quantized.items()}
    specs: list[TensorSpec] = []
    for spec in stored:
        if spec.name in replaced:
            specs += formats.specs(replaced[spec.name], spec, resolved)
        else:
            specs.append(spec)
    kv_scales = _kv_scales(recipe, architecture, stored)
    ignored = [
        *(name for name in architecture.linears if name not in quantized),
        *architecture.never,  # engines treat them as linear layers
    ]
    return Plan(
        recipe=resolved,
        asked_digest=recipe.digest,
        quantized=quantized,
        ignored=ignored,
        also_ignored=_in_transformers(architecture, ignored),
        specs=specs + kv_scales,
        kv_scales=kv_scales,
        n_parameters=sum(spec.n_elements for spec in stored),
        unquantised={name: by_name[f"{name}.weight"] for name in every if name in kept},
        notes=[
            note
            for note in (word, *_serving_notes(architecture, quantized), _rowless_note(rowless))
            if note
        ],
    )


def with_cache(
    plan: Plan, recipe: Recipe, architecture: Architecture, stored: list[TensorSpec]
) -> Plan:
    """The plan of a recipe that adds an FP8 cache to an already planned one."""
    kv_scales = _kv_scales(recipe, architecture, stored)
    same = plan.recipe.weights
    return replace(
        plan,
        recipe=recipe.model_copy(update={"weights": same}),
        asked_digest=recipe.digest,
        specs=plan.specs + kv_scales,
        kv_scales=kv_scales,
    )


def _in_transformers(architecture: Architecture, ignored: Sequence[str]) -> list[str]:
    """transformers' names of ignored layers; those that a pattern already covers are left out."""
    patterns = [re.compile(name[3:]) for name in ignored if name.startswith("re:")]
    found = (architecture.module_names.get(name) for name in ignored)
    return [
        name
        for name in dict.fromkeys(found)
        if name is not None and not any(pattern.match(name) for pattern in patterns)
    ]


def _serving_notes(architecture: Architecture, quantized: Iterable[str]) -> list[str | None]:
    has_experts = any(EXPERT.search(name) for name in quantized)
    return [architecture.experts_note if has_experts else None, architecture.note]


def _rowless(
    architecture: Architecture, quantized: Mapping[str, TensorSpec], recipe: Recipe
) -> list[str]:
    """Layers whose rows engines reorder, where this recipe's format stores other per-row
    tensors.
    """
    return [
        name
        for name, weight in quantized.items()
        if name.rpartition(".")[2] == architecture.rows_by_head
        and any(part.shape[:1] != weight.shape[:1] for part in formats.specs(name, weight, recipe))
    ]


def _rowless_note(left: list[str]) -> str | None:
    if not left:
        return None
    return (
        f"{left[0]} and {len(left) - 1} more stay in 16 bits: vLLM before 0.32 sorts their rows by "
        "head, which it cannot do with this recipe's tensors; fp8-dynamic and int8-w8a8 "
        "quantise them"
    )


def _kv_scales(
    recipe: Recipe, architecture: Architecture, stored: list[TensorSpec]
) -> list[TensorSpec]:
    if recipe.kv_cache is None:
        return []
    if not architecture.attentions:
        raise RecipeError(
            f"recipe {recipe.name}: no layer of this model caches keys and values in a form that "
            "has scales; leave the KV cache in 16 bits"
        )
    dtype = usual_dtype(stored)
    n_heads = architecture.n_kv_heads if recipe.kv_cache.strategy == "attn_head" else None
    specs = [s for name in architecture.attentions for s in formats.kv_specs(name, dtype, n_heads)]
    if taken := {spec.name for spec in specs} & {spec.name for spec in stored}:
        raise RecipeError(f"recipe {recipe.name}: the source already has a {min(taken)}")
    return specs


def _check_head(recipe: Recipe, architecture: Architecture, modules: list[str]) -> None:
    if HEAD_GROUP["targets"] not in recipe.group_targets:
        return
    heads = [name for name in modules if name == architecture.head]
    if not heads:
        raise RecipeError(
            f"recipe {recipe.name}: this model's {HEAD} shares the embedding's weight, which stays "
            "in 16 bits; leave out +head-int8"
        )
    if recipe.part(heads[0]).weights == recipe.weights:
        raise RecipeError(
            f"recipe {recipe.name}: the head of this model is called {heads[0]}; copy the recipe "
            "and give it a group with this name"
        )


def _check_fused(recipe: Recipe, architecture: Architecture, chosen: set[str]) -> None:
    fused, seen = families.fused(), set()
    for name in architecture.linears:
        parent, _, last = name.rpartition(".")
        for parts in fused:
            if last not in parts or (parent, parts) in seen:
                continue
            seen.add((parent, parts))
            present = [s for part in parts if (s := f"{parent}.{part}") in architecture.linears]
            if 0 < sum(s in chosen for s in present) < len(present):
                left = next(s for s in present if s not in chosen)
                raise RecipeError(
                    f"recipe {recipe.name}: {left} is left alone but its siblings are not; vLLM "
                    f"fuses {', '.join(parts)} into one layer, so quantise all of them or none"
                )
            if not recipe.groups:
                continue
            if len({recipe.part(s).weights for s in present if s in chosen}) > 1:
                raise RecipeError(
                    f"recipe {recipe.name}: {present[0]} and its siblings have different formats; "
                    f"vLLM fuses {', '.join(parts)} into one layer, so give all of them the same"
                )


def _check_experts(recipe: Recipe, modules: list[str]) -> None:
    if not recipe.groups:
        return
    found: dict[str, str] = {}
    for name in modules:
        if (match := EXPERT.search(name)) is None:
            continue
        first = found.setdefault(name[: match.start()], name)
        if recipe.part(first).weights != recipe.part(name).weights:
            raise RecipeError(
                f"recipe {recipe.name}: {first} and {name} have different formats; vLLM loads all "
                "experts of a block as one layer, so give all of them the same"
            )


def _check_blocks(recipe: Recipe, architecture: Architecture, modules: list[str]) -> None:
    if not any(part.weights.block_structure for part in recipe.parts):
        return
    for name in modules:
        block = recipe.part(name).weights.block_structure
        if block is None:
            continue
        high, wide = block
        rows, columns = architecture.linears[name]
        if rows % high or columns % wide:
            raise RecipeError(
                f"recipe {recipe.name}: {name} is {rows} x {columns}, which blocks of {high} x "
                f"{wide} do not divide; use fp8-dynamic for this model"
            )


def _check_shapes(recipe: Recipe, architecture: Architecture, modules: list[str]) -> None:
    seen = set()
    for name in modules:
        rows, columns = architecture.linears[name]
        if not recipe.groups and (rows, columns) in seen:
            continue
        seen.add((rows, columns))
        if reason := formats.of(recipe).misfit(rows, columns, recipe.part(name)):
            raise RecipeError(f"recipe {recipe.name}: {name} is {rows} x {columns}, and {reason}")


def fused_with(module: str, among: Container[str]) -> list[str]:
    """The layers, itself included, that vLLM fuses with a layer."""
    parent, _, last = module.rpartition(".")
    for parts in families.fused():
        if last in parts:
            return [name for part in parts if (name := f"{parent}.{part}") in among]
    return [module]


def sharing(module: str, among: Collection[str]) -> list[str]:
    """The layers, itself included, whose tensors share one global scale: those that vLLM fuses, and
    for experts those of all other experts of the layer.
    """
    found = EXPERT.search(module)
    if found is None:
        return fused_with(module, among)
    before, after = module[: found.start()], module[found.end() :]
    ends = next((parts for parts in families.fused() if after in parts), (after,))
    return [
        name
        for name in among
        if (other := EXPERT.search(name))
        and name[: other.start()] == before
        and name[other.end() :] in ends
    ]


def usual_dtype(stored: list[TensorSpec]) -> str:
    """The dtype of most weights of a model."""
    sizes: Counter[str] = Counter()
    for spec in stored:
        sizes[spec.dtype] += spec.n_elements
    return sizes.most_common(1)[0][0]


def check_tied(source: ModelSource, architecture: Architecture) -> None:
    """Check that a tied tensor that was stored twice is identical, so that it can be
    written once.
    """
    import torch

    from quantkit.errors import SourceError

    for name, owner in architecture.tied.items():
        if name in source.tensors and owner in source.tensors:
            # As bytes: NaN is a separate fault, found later, and not a difference here.
            copies = [source.tensors[n].read().view(torch.uint8) for n in (name, owner)]
            if not torch.equal(*copies):
                raise SourceError(
                    f"{source.folder}: config.json ties {name} to {owner} but the file holds two "
                    "different tensors; set tie_word_embeddings to false, or remove one"
                )
