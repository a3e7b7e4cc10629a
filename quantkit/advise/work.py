"""What a token costs a model in one format: bytes that are read and weights that are multiplied."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.advise import weights
from quantkit.advise.formats import Format
from quantkit.advise.shape import EMBEDDING, HEAD, ModelShape
from quantkit.model.architecture import EXPERT
from quantkit.recipe import GGUFRecipe, Recipe

GGUF_EXPERT = re.compile(r"_exps\.")
CHOSEN = ("num_experts_per_tok", "moe_top_k", "num_experts_per_token")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


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
    """Weights that are multiplied in the format's own arithmetic ..."""
    plain: Part
    """... and those that are multiplied in 16 bits."""
    n_experts: int = 1
    n_chosen: int = 1
    """Experts that each token takes."""

    def bytes_read(self, n_tokens: int) -> float:
        """By that many tokens together: the more, the more experts are wanted by some."""
        missed = (1 - self.n_chosen / self.n_experts) ** n_tokens
        return self.read.dense + self.read.experts * (1 - missed)

    def flops(self, part: Part) -> float:
        """Of one token."""
        return 2.0 * (part.dense + part.experts * self.n_chosen / self.n_experts)


def of(shape: ModelShape, format: Format) -> Work:
    """The work that a model is in a format."""
    recipe, tied = format.recipe, _is_tied(shape)
    if isinstance(recipe, GGUFRecipe):
        sizes = weights.gguf_tensors(shape, recipe)
        read = _part(
            (size, bool(GGUF_EXPERT.search(name)))
            for name, size in sizes.items()
            if tied or name != "token_embd.weight"
        )
        stored = sum(sizes.values())
    else:
        specs = weights.specs(shape, recipe) if isinstance(recipe, Recipe) else shape.stored
        read = _part(
            (spec.size_bytes, bool(EXPERT.search(spec.name)))
            for spec in specs
            if tied or spec.name != EMBEDDING
        )
        stored = sum(spec.size_bytes for spec in specs)
    chosen = _own_modules(shape, format)
    multiplied = [t for t in shape.tensors if t.is_linear or (tied and t.name == EMBEDDING)]
    n_experts = _first(shape, EXPERTS)
    return Work(
        stored_bytes=stored,
        read=read,
        own=_part(
            (t.n_elements, bool(EXPERT.search(t.name)))
            for t in multiplied
            if t.name.removesuffix(".weight") in chosen
        ),
        plain=_part(
            (t.n_elements, bool(EXPERT.search(t.name)))
            for t in multiplied
            if t.name.removesuffix(".weight") not in chosen
        ),
        n_experts=n_experts,
        n_chosen=min(_first(shape, CHOSEN), n_experts),
    )


def _own_modules(shape: ModelShape, format: Format) -> set[str]:
    if not format.has_own_arithmetic or not isinstance(format.recipe, Recipe):
        return set()
    return set(weights.plan(shape, format.recipe).quantized)


def _is_tied(shape: ModelShape) -> bool:
    """Whether the table of embeddings is also the last layer, and so is read as a whole."""
    return not any(tensor.name == HEAD for tensor in shape.tensors)


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
