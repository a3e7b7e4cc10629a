"""What a token costs a model in one format: bytes that are read and weights that are multiplied."""

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
    """Bytes that are read to compute a token; of a table that is looked up, next to nothing."""
    own: Part
    """Weights of layers that are multiplied in the format's own arithmetic ..."""
    plain: Part
    """... and those that are multiplied in 16 bits."""
    n_experts: int = 1
    n_chosen: int = 1
    """Experts that each token takes."""
    head: int = 0
    """Weights of the last layer, which only tokens that are followed by a new one go through."""
    head_bytes: int = 0
    """Of `read`, those of the last layer."""
    is_head_own: bool = False
    """Whether the last layer is multiplied in the format's own arithmetic."""

    def experts_wanted(self, n_tokens: int) -> float:
        """The share of experts that some of so many tokens together want: the more, the more."""
        return 1 - float((1 - self.n_chosen / self.n_experts) ** n_tokens)

    def bytes_read(self, n_tokens: int) -> float:
        """By that many tokens together."""
        return self.read.dense + self.read.experts * self.experts_wanted(n_tokens)


def of(shape: ModelShape, format: Format) -> Work:
    """The work that a model is in a format."""
    recipe, tied = format.recipe, _is_tied(shape)
    if isinstance(recipe, GGUFRecipe):
        sizes = weights.gguf_tensors(shape, recipe)
        looked_up, last, experts = "token_embd.weight", "output.weight", GGUF_EXPERT
    else:
        sizes = {spec.name: n * spec.size_bytes for spec, n in weights.counted(shape, recipe)}
        looked_up, last, experts = shape.embedding, shape.head.removesuffix("weight"), EXPERT
    n_experts = _first(shape, EXPERTS)
    is_mixture = n_experts > 1
    read = _part(
        (size, is_mixture and experts.search(name) is not None)
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
    """Layers but the last, each with its weights, those of all that it stands for, and whether it
    is an expert's."""
    sample = weights.sample_of(shape, recipe)
    key = "multiplied", id(sample.shape)
    if key not in shape.made:
        is_mixture = _first(shape, EXPERTS) > 1
        found = [
            (
                t.name.removesuffix(".weight"),
                (
                    t.n_elements * sample.count(t.name),
                    is_mixture and EXPERT.search(t.name) is not None,
                ),
            )
            for t in sample.shape.tensors
            if t.is_linear and t.name != shape.head
        ]
        shape.made[key] = sample, found  # with the sample, so that its id stays its own
    known: list[tuple[str, tuple[int, bool]]] = shape.made[key][1]
    return known


def _own_modules(shape: ModelShape, format: Format) -> set[str]:
    if not format.has_own_arithmetic or not isinstance(format.recipe, Recipe):
        return set()
    return set(weights.plan(shape, format.recipe).quantized)


def _is_tied(shape: ModelShape) -> bool:
    """Whether the table of embeddings is also the last layer, and so is read as a whole."""
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
