"""Cost per token of a model in one format: bytes read and weights multiplied."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.advise import weights
from quantkit.advise.formats import Format
from quantkit.advise.shape import ModelShape
from quantkit.model.architecture import EXPERT
from quantkit.model.source import EXPERTS
from quantkit.recipe import GGUFRecipe, Recipe

GGUF_EXPERT = re.compile(r"_exps\.")
CHOSEN = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token")


@dataclass(frozen=True)
class Part:
    """An amount that every token needs, and one that is spread over experts."""

    dense: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Work:
    """A model in one format, as far as time depends on it."""

    stored_bytes: int
    read: Part
    """Bytes read to compute a token; next to nothing for lookup tables."""
    own: Part
    """Layer weights multiplied in the format's own arithmetic."""
    plain: Part
    """Layer weights multiplied in 16 bits."""
    n_experts: int = 1
    n_chosen: int = 1
    """Experts per token."""
    head: int = 0
    """Weights of the output head, which only tokens followed by a new one go through."""
    head_bytes: int = 0
    """The head's part of `read`."""
    is_head_own: bool = False
    """Whether the head is multiplied in the format's own arithmetic."""

    def experts_needed(self, n_tokens: int) -> float:
        """Share of experts that at least one of this many tokens needs."""
        return 1 - float((1 - self.n_chosen / self.n_experts) ** n_tokens)

    def bytes_read(self, n_tokens: int) -> float:
        """Bytes read by that many tokens together."""
        return self.read.dense + self.read.experts * self.experts_needed(n_tokens)


def of(shape: ModelShape, format: Format) -> Work:
    """The work of a model in a format."""
    recipe, tied = format.recipe, _is_tied(shape)
    if isinstance(recipe, GGUFRecipe):
        sizes = weights.gguf_tensors(shape, recipe)
        looked_up, last, experts = "token_embd.weight", "output.weight", GGUF_EXPERT
    else:
        sizes = {spec.name: n * spec.size_bytes for spec, n in weights.counted(shape, recipe)}
        looked_up, last, experts = shape.embedding, shape.head.removesuffix("weight"), EXPERT
    n_experts = _first(shape, EXPERTS)
    is_moe = n_experts > 1
    read = _part(
        (size, is_moe and experts.search(name) is not None)
        for name, size in sizes.items()
        if tied or name != looked_up
    )
    begins = looked_up if tied else last
    chosen = _own_modules(shape, format)
    multiplied = _multiplied(shape, None if isinstance(recipe, GGUFRecipe) else recipe)
    last_name = shape.embedding if tied else shape.head
    head = next((t for t in shape.sample.shape.tensors if t.name == last_name), None)
    return Work(
        stored_bytes=sum(sizes.values()),
        read=read,
        own=_part(amount for module, amount in multiplied if module in chosen),
        plain=_part(amount for module, amount in multiplied if module not in chosen),
        n_experts=n_experts,
        n_chosen=min(_first(shape, CHOSEN), n_experts),
        head=0 if head is None else head.n_elements,
        head_bytes=sum(size for name, size in sizes.items() if name.startswith(begins)),
        is_head_own=head is not None and head.name.removesuffix(".weight") in chosen,
    )


def _multiplied(shape: ModelShape, recipe: Recipe | None) -> list[tuple[str, tuple[int, bool]]]:
    """Layers except the head, each with its weights (of all that it stands for) and whether it is
    an expert.
    """
    sample = weights.sample_of(shape, recipe)
    key = "multiplied", id(sample.shape)
    if key not in shape.cache:
        is_moe = _first(shape, EXPERTS) > 1
        found = [
            (
                t.name.removesuffix(".weight"),
                (
                    t.n_elements * sample.count(t.name),
                    is_moe and EXPERT.search(t.name) is not None,
                ),
            )
            for t in sample.shape.tensors
            if t.is_linear and t.name != shape.head
        ]
        shape.cache[key] = sample, found  # keeps the sample alive, so that its id is not reused
    known: list[tuple[str, tuple[int, bool]]] = shape.cache[key][1]
    return known


def _own_modules(shape: ModelShape, format: Format) -> set[str]:
    if not format.has_own_arithmetic or not isinstance(format.recipe, Recipe):
        return set()
    return set(weights.plan(shape, format.recipe).quantized)


def _is_tied(shape: ModelShape) -> bool:
    """Whether the embedding table is also the output head, and so is read in full."""
    return not any(tensor.name == shape.head for tensor in shape.sample.shape.tensors)


def _part(amounts: Iterable[tuple[int, bool]]) -> Part:
    dense = experts = 0
    for amount, is_expert in amounts:
        if is_expert:
            experts += amount
        else:
            dense += amount
    return Part(dense, experts)


def _first(shape: ModelShape, keys: Iterable[str]) -> int:
    return max(1, int(next((shape.config[key] for key in keys if shape.config.get(key)), 1)))
