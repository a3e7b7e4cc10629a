"""Quantise a model: with recipes, with the one that fits a GPU, or within a budget."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import launch
from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.calls.data import Data, default_set
from quantkit.errors import UsageError
from quantkit.hardware.place import Place
from quantkit.registry import NATIVE, check_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quantkit.export.checkpoint import Checkpoint
    from quantkit.mixed.budget import Budget, Choice
    from quantkit.model.source import ModelSource
    from quantkit.onepass.prepare import Job, Run
    from quantkit.onepass.ranks import Ranks
    from quantkit.opening import Model
    from quantkit.progress import Progress
    from quantkit.recipe import AnyRecipe


TABLE_FOLDER = "sensitivity"
"""Where `quantkit sensitivity` writes by default."""


@dataclass(frozen=True)
class Spending:
    """A budget instead of recipes: exactly one of bits, size and place."""

    bits: float | None = None
    """Stored bits per quantised weight."""
    size: str | int | None = None
    """Size of all files, such as 9GiB, or bytes."""
    place: Place | None = None
    """All the memory that GPUs have."""
    formats: tuple[str, ...] = ()
    table: Path | None = None
    """An existing table of `quantkit sensitivity`."""
    target: str = "vllm"

    def check(self) -> None:
        """Refuse none and several of them."""
        if sum(given is not None for given in (self.bits, self.size, self.place)) != 1:
            raise UsageError("give only one of --bits N, --size SIZE and --fit GPU --mixed")

    def budget(self, model: str) -> "Budget":
        """In bits or bytes."""
        from quantkit.mixed.budget import Budget, size_bytes

        if self.place is not None:
            from quantkit.advise.mixed import budget

            where = self.place
            return budget(
                model, where.gpu, where.count, where.context, where.users or 1, self.target
            )
        size = size_bytes(self.size) if isinstance(self.size, str) else self.size
        return Budget(self.bits, size)


@dataclass(frozen=True)
class Quantized:
    """The result."""

    checkpoints: "list[Checkpoint]" = field(default_factory=list)
    plan: "Job | None" = None
    """Plan of a dry run with recipes."""
    choice: "Choice | None" = None
    """What a budget buys."""


@dataclass(frozen=True)
class Quantization:
    """One call of `quantize`."""

    model: "Model"
    out: Path
    recipes: "Sequence[str | Path | AnyRecipe]" = ()
    fit: Place | None = None
    """Choose the recipe for these GPUs."""
    spending: Spending | None = None
    """Choose formats layer by layer."""
    data: Data = field(default_factory=Data)
    ours_by_default: bool = False
    """Whether a built-in set is used if a budget needs data and none is named."""
    format: str | None = None
    engine: str = NATIVE
    tune: bool = False
    imatrix: Path | None = None
    requantize: bool = False
    offload: str = "auto"
    device: str = "auto"
    ranks: "Ranks | None" = None
    """The processes that share the work."""
    tokenizer: Any = None
    """Tokenizer of a model in memory."""
    revision: str | None = None
    trust_remote_code: bool = False
    force: bool = False
    dry_run: bool = False

    @property
    def needs_hub(self) -> bool:
        data = self.data
        if not data.is_given and (self.fit is not None or self.ours_by_default):
            data = Data(default_set(self.model))
        return not hub.is_local(self.model) or data.needs_hub

    @property
    def needs_transformers(self) -> bool:
        if self.engine != NATIVE:
            return False
        # GGUF to GGUF needs none of it.
        return not self.is_file or not all("gguf" in str(recipe) for recipe in self.recipes)

    @property
    def is_file(self) -> bool:
        """Whether the model is a GGUF file."""
        model = self.model
        return (
            isinstance(model, str | Path)
            and str(model).lower().endswith(".gguf")
            and Path(model).is_file()
        )

    def ready(self, notify: Notify = silent) -> "Work[Quantized]":
        """Validate before a weight is read."""
        check_engine(self.engine)
        if isinstance(self.model, str) and ":" in self.model:
            from quantkit.model.source import hub_file

            if (file := hub_file(self.model)) is not None:
                return replace(self, model=file).ready(notify)
        if self.spending is not None:
            return self._ready_to_spend(self.spending, notify)
        recipes, data = self.recipes, self.data
        if self.fit is not None:
            from quantkit.advise import recipe_choice

            if self.is_file:
                raise UsageError(
                    "--fit cannot be combined with a GGUF file as MODEL; name a recipe"
                )
            chosen = recipe_choice.choose(str(self.model), self.fit)
            recipes = [chosen.recipe]
            for reason in chosen.reasons:
                notify(reason)
        if self.is_file and self.engine != NATIVE:
            raise UsageError("--engine cannot be combined with a GGUF file as MODEL; leave it out")
        loaded = load_recipes(recipes, self.engine, self.format, self.tune)
        if self.is_file and not data.is_given and _are_files(loaded):
            return self._ready_for_file(loaded)
        if self.fit is not None and any(recipe.needs_calibration for recipe in loaded):
            data = data.or_default(self.model, notify)
        return self._ready_for_recipes(loaded, data)

    def _ready_for_recipes(self, recipes: "list[AnyRecipe]", data: Data) -> "Work[Quantized]":
        from quantkit.onepass import checks

        checks.check(recipes, self.out, data.is_given, self.imatrix, self.engine, self.force)
        data.check()
        model = self._model()
        if model is not self.model:
            checks.require_least_space(model, recipes, self.out)

        def work(progress: "Progress") -> Quantized:
            from quantkit.onepass.prepare import prepare
            from quantkit.onepass.run import quantize
            from quantkit.opening import opened

            if self.dry_run and not launch.is_first():
                return Quantized()
            choice, how = data.choice(), self._run(progress)
            trusting, again = self.trust_remote_code, self.requantize
            with opened(model, self.tokenizer, None, trusting, again) as source:
                if self.dry_run:
                    plan = prepare(source, recipes, self.out, self.device, choice, how)
                    return Quantized(plan=plan)
                return Quantized(quantize(source, recipes, self.out, self.device, choice, how))

        return work

    def _ready_to_spend(self, spending: Spending, notify: Notify) -> "Work[Quantized]":
        spending.check()
        if self.recipes:
            raise UsageError("--bits, --size and --mixed choose the formats; leave out --recipe")
        given = {
            "--engine": self.engine != NATIVE,
            "--format": self.format is not None,
            "--tune": self.tune,
        }
        if wrong := [option for option, is_given in given.items() if is_given]:
            raise UsageError(
                f"{wrong[0]} cannot be combined with --bits, --size or --mixed; leave it out"
            )
        if self.dry_run and spending.table is None:
            raise UsageError(
                "--dry-run with a budget needs a sensitivity table: run "
                f"`{self._measuring(spending)}`, then add --sensitivity {TABLE_FOLDER}"
            )
        self.data.check()
        validation.output(self.out)
        model = self._model()
        data = self.data
        if self.ours_by_default and not self.dry_run:
            data = data.or_default(self.model, notify)

        def work(progress: "Progress") -> Quantized:
            from quantkit.mixed.run import MixedOptions, choose, quantize
            from quantkit.mixed.table import Table
            from quantkit.opening import opened

            budget = spending.budget(str(self.model))
            wanted = MixedOptions(budget, spending.formats, spending.table, spending.target)
            trusting, again = self.trust_remote_code, self.requantize
            with opened(model, self.tokenizer, None, trusting, again) as source:
                if self.dry_run and spending.table is not None:
                    return Quantized(choice=choose(source, wanted, Table.read(spending.table)))
                how = self._run(progress)
                made = quantize(source, wanted, self.out, self.device, data.choice(), how)
            return Quantized(made.checkpoints, choice=made.choice)

        return work

    def _measuring(self, spending: Spending) -> str:
        """The command that makes the table for a budget."""
        data = self.data
        given = {
            "--calibration": data.calibration or default_set(self.model),
            "--samples": data.samples,
            "--length": data.length,
            "--for": spending.target if spending.target != "vllm" else None,
            "--formats": ",".join(spending.formats) or None,
            "--revision": self.revision,
        }
        options = [str(part) for pair in given.items() if pair[1] is not None for part in pair]
        options += ["--requantize"] if self.requantize else []
        options += ["--trust-remote-code"] if self.trust_remote_code else []
        words = ["quantkit", "sensitivity", str(self.model), *options, "-o", TABLE_FOLDER]
        return shlex.join(words)

    def _ready_for_file(self, recipes: "list[AnyRecipe]") -> "Work[Quantized]":
        """GGUF to GGUF: any architecture, since only types change."""
        if self.dry_run:
            raise UsageError(
                "--dry-run does not apply when a GGUF file is made from another; leave it out"
            )

        def work(progress: "Progress") -> Quantized:
            from quantkit.onepass.from_gguf import quantize_file

            if not launch.is_first():
                return Quantized()
            how, path = self._run(progress), Path(str(self.model))
            return Quantized(
                quantize_file(path, recipes, self.out, self.device, how, self.requantize)
            )

        return work

    def _model(self) -> "ModelSource | Any":
        """A named model is opened now; a model in memory is written out when work begins."""
        if not isinstance(self.model, str | Path):
            return self.model
        if self.is_file:  # needs transformers, which is loaded later
            return self.model
        from quantkit.model.source import ModelSource

        return ModelSource.open(
            str(self.model), self.revision, self.trust_remote_code, requantize=self.requantize
        )

    def _run(self, progress: "Progress") -> "Run":
        from quantkit.onepass.prepare import Run
        from quantkit.onepass.ranks import Ranks

        ranks = self.ranks or Ranks()
        return Run(progress, self.force, self.offload, self.engine, self.imatrix, ranks)


def load_recipes(
    named: "Sequence[str | Path | AnyRecipe]",
    engine: str = NATIVE,
    format: str | None = None,
    tune: bool = False,
) -> "list[AnyRecipe]":
    """Recipes are read before the model is opened: they are quick to read and often wrong."""
    from quantkit.recipe import load

    check_engine(engine)
    loaded = [load(str(one)) if isinstance(one, str | Path) else one for one in named]
    if tune:
        if engine != NATIVE:
            raise UsageError(
                f"--tune needs the native engine; leave out --tune or --engine {engine}"
            )
        loaded = [recipe.tuned() for recipe in loaded]
    if format is not None:
        loaded = [_in_format(recipe, format) for recipe in loaded]
    if engine != NATIVE:
        # A distinct name, so that one report can compare both engines.
        loaded = [r.model_copy(update={"name": f"{r.name}-{engine}"}) for r in loaded]
    return loaded


def _are_files(recipes: "list[AnyRecipe]") -> bool:
    from quantkit.recipe import GGUFRecipe

    return all(isinstance(recipe, GGUFRecipe) for recipe in recipes)


def _in_format(recipe: "AnyRecipe", format: str) -> "AnyRecipe":
    from quantkit.recipe import Recipe

    if isinstance(recipe, Recipe):
        return recipe.in_format(format)
    raise UsageError(f"recipe {recipe.name} makes a GGUF file, so --format does not apply")
