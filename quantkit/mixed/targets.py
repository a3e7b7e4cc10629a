"""Recipes and sizes of a choice, for vLLM or for llama.cpp."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.export import folder as folders
from quantkit.gguf import conversion
from quantkit.gguf import plan as gguf_plan
from quantkit.gguf.layout import Layout
from quantkit.gguf.writer import file_bytes
from quantkit.mixed import candidates, gguf_candidates, recipe_file
from quantkit.mixed.table import Table
from quantkit.model.architecture import Architecture
from quantkit.model.headers import TensorSpec
from quantkit.model.source import ModelSource
from quantkit.plan import checkpoint as planning
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe


@dataclass(frozen=True)
class VLLM:
    """Checkpoints in compressed-tensors format."""

    architecture: Architecture
    stored: list[TensorSpec]

    @classmethod
    def of(cls, source: ModelSource) -> "VLLM":
        architecture = Architecture.of(source.folder, source.trust_remote_code, source.tensors)
        return cls(architecture, architecture.stored(source))

    def names(self, formats: Sequence[str]) -> list[str]:
        return [one.name for one in candidates.by_names(formats)]

    def is_common(self, format: str) -> bool:
        return candidates.find(format).is_common

    def recipe(
        self, table: Table, choice: Sequence[int], name: str, summary: str
    ) -> AnyRecipe | None:
        return recipe_file.recipe(table, choice, name, summary)

    def file_bytes(self, recipe: AnyRecipe | None) -> int:
        specs = self.stored
        if isinstance(recipe, Recipe):
            specs = planning.make(self.architecture, self.stored, recipe).specs
        return folders.weight_bytes(specs)


@dataclass(frozen=True)
class LlamaCpp:
    """GGUF files."""

    source: ModelSource
    layout: Layout

    @classmethod
    def of(cls, source: ModelSource) -> "LlamaCpp":
        return cls(source, Layout.of(source))

    def names(self, formats: Sequence[str]) -> list[str]:
        return [one.name for one in gguf_candidates.by_names(formats)]

    def is_common(self, format: str) -> bool:
        return True

    def recipe(
        self, table: Table, choice: Sequence[int], name: str, summary: str
    ) -> AnyRecipe | None:
        if {table.formats[place] for place in choice} == {"BF16"}:
            return None
        return gguf_candidates.recipe(table, choice, self.layout, name, summary)

    def file_bytes(self, recipe: AnyRecipe | None) -> int:
        if recipe is None:
            recipe = GGUFRecipe(name="bf16", summary="16 bits", gguf="BF16", tensors={})
        assert isinstance(recipe, GGUFRecipe)
        plan = gguf_plan.make(self.layout, recipe, has_importance=True)
        kinds = [(t.name, t.shape, plan.kinds[t.name]) for t in self.layout.tensors]
        return file_bytes(conversion.metadata(self.layout, recipe, self.source), kinds)


def of(source: ModelSource, engine: str) -> VLLM | LlamaCpp:
    """The target for a model and an engine."""
    return LlamaCpp.of(source) if engine == "llama.cpp" else VLLM.of(source)
