"""The whole pipeline, and the sensitivity table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.calls.data import Data
from quantkit.calls.quantize import load_recipes
from quantkit.calls.score import ScoreOptions, check
from quantkit.registry import NATIVE
from quantkit.storage import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.mixed.table import Table
    from quantkit.pipeline import Outcome
    from quantkit.progress import Progress
    from quantkit.recipe import AnyRecipe


@dataclass(frozen=True)
class Line:
    """One call of `run`: quantize, verify, score and report."""

    model: str
    recipes: "Sequence[str | AnyRecipe]"
    out: Path
    data: Data = field(default_factory=Data)
    asked: ScoreOptions | None = None
    """None: what suits the model."""
    engine: str = NATIVE
    offload: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    force: bool = False
    requantize: bool = False

    @property
    def _asked(self) -> ScoreOptions:
        return self.asked or ScoreOptions.of(None, [self.model])

    @property
    def needs_hub(self) -> bool:
        asked = hub.tasks_need(self._asked.tasks)
        return not hub.is_local(self.model) or asked or self.data.needs_hub

    @property
    def needs_transformers(self) -> bool:
        return self.engine == NATIVE

    def ready(self, notify: Notify = silent) -> "Work[Outcome]":
        """Validate before a weight is read."""
        from quantkit.model.source import ModelSource
        from quantkit.onepass import checks
        from quantkit.onepass.mark import refuse_others

        recipes = load_recipes(self.recipes, self.engine)
        checks.refuse_twice(recipes)
        checks.check_learning(recipes, self.data.is_given, None, self.engine)
        self.data.check()
        validation.output(self.out)
        targets = [self.out / recipe.name for recipe in recipes]
        # A checkpoint left here by an earlier run, or a part of one, may be resumed.
        refuse_others([one for one in targets if not (one / MANIFEST).is_file()], self.force)
        source = ModelSource.open(
            self.model, self.revision, self.trust_remote_code, requantize=self.requantize
        )
        check(self._asked)
        checks.require_least_space(source, recipes, self.out)

        def work(progress: "Progress") -> "Outcome":
            from quantkit import pipeline
            from quantkit.onepass.prepare import Run

            how = Run(progress, self.force, self.offload, self.engine)
            choice = self.data.choice()
            return pipeline.run(source, recipes, self._asked, self.out, self.device, choice, how)

        return work


def demo(out: Path, device: str) -> Line:
    """The pipeline on the model that ships with quantkit, with the demo's recipes."""
    from quantkit import resources
    from quantkit.recipe import load

    recipes = [recipe for recipe in map(load, resources.names("recipes")) if recipe.demo]
    return Line("demo", recipes, out, Data("python-docs"), device=device, force=True)


@dataclass(frozen=True)
class Measuring:
    """One call of `sensitivity`."""

    model: str
    out: Path
    data: Data = field(default_factory=Data)
    formats: tuple[str, ...] = ()
    target: str = "vllm"
    requantize: bool = False
    offload: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    force: bool = False

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        return not hub.is_local(self.model) or self.data.needs_hub

    def ready(self, notify: Notify = silent) -> "Work[Table]":
        """Validate before a weight is read."""
        from quantkit.model.source import ModelSource

        self.data.check()
        validation.output(self.out)
        named: ModelSource | None = None
        if not self.model.lower().endswith(".gguf"):
            named = ModelSource.open(
                self.model, self.revision, self.trust_remote_code, requantize=self.requantize
            )

        def work(progress: "Progress") -> "Table":
            from quantkit.gguf.source import open_model
            from quantkit.mixed.run import write_table
            from quantkit.onepass.prepare import Run

            source = named or open_model(self.model, requantize=self.requantize)
            how, choice = Run(progress, self.force, self.offload), self.data.choice()
            return write_table(
                source, self.out, self.device, choice, how, self.formats, self.target
            )

        return work
