"""Resolves the names in a sweep's file, before anything is run.

Whatever can be wrong with a name is reported here. The result is plain, self-contained data:
workers need neither the file nor what is next to it.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import resources
from quantkit.calibration import lookup
from quantkit.calibration import spec as set_spec
from quantkit.calibration.reading import files
from quantkit.calibration.reading.files import is_data
from quantkit.errors import DataError, QuantkitError, SourceError, SweepError
from quantkit.gating import policy as policies
from quantkit.home import expanded
from quantkit.model.source import ModelSource, is_local, locate
from quantkit.recipe import AnyRecipe, GGUFRecipe, load
from quantkit.scoring import lmeval, suites, task_names
from quantkit.storage import sha256_of
from quantkit.sweep.spec import ModelSpec, SetChoice, SweepSpec


@dataclass(frozen=True)
class Model:
    """A model, and what identifies it."""

    label: str
    place: str
    """A folder, a hub id or `demo` ..."""
    revision: str | None
    """... and the commit of a hub model."""
    identity: str
    trust_remote_code: bool
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """A set that is built for each model, or a folder that was built before."""

    label: str
    decisive: dict[str, Any]
    """Everything that determines its tokens."""
    work: dict[str, Any]
    """Everything that is needed to make it."""


@dataclass(frozen=True)
class Unit:
    """What is scored at a time: a task without parts, or one subject of a group."""

    task: str
    asked: str
    """Its name in the sweep's file: the task itself, or the group that it is in."""


@dataclass(frozen=True)
class Resolved:
    """A sweep whose names are all resolved."""

    spec: SweepSpec
    models: tuple[Model, ...]
    recipes: tuple[AnyRecipe, ...]
    sets: tuple[Calibration, ...]
    units: tuple[Unit, ...]
    groups: dict[str, dict[str, Any]]
    """Groups of tasks: their members, and how lm-eval aggregates them."""
    policy: dict[str, Any] | None
    """The text of a gate's policy, None for the defaults; None where nothing is judged."""

    def learns(self, recipe: AnyRecipe) -> bool:
        """Whether a recipe is made once per calibration set."""
        return recipe.needs_calibration or (isinstance(recipe, GGUFRecipe) and bool(self.sets))


def resolve(spec: SweepSpec, base: Path) -> Resolved:
    """Resolve every name; all that are wrong are reported at once."""
    wrong: list[str] = []

    def tried(function: Any, items: Sequence[Any]) -> list[Any]:
        found = []
        for item in items:
            try:
                found.append(function(item))
            except QuantkitError as error:
                wrong.append(str(error))
        return found

    recipes = tried(lambda name: load(_beside(name, base, "recipes")), spec.recipes)
    sets = tried(lambda choice: _set(choice, base), spec.calibration)
    loaded = tried(_units, [spec.tasks])
    policy = tried(lambda name: _policy(name, base), [spec.policy])
    models = tried(lambda model: _model(model, base), spec.models)
    names = [recipe.name for recipe in recipes]
    wrong += [f"two recipes are called {n}" for n in sorted(set(names)) if names.count(n) > 1]
    learning = [recipe.name for recipe in recipes if recipe.needs_calibration]
    if learning and not spec.calibration:
        known = ", ".join(resources.names("calibration"))
        wrong.append(
            f"recipe {learning[0]} needs calibration data: name sets under `calibration:` "
            f"({known}, or files of your own)"
        )
    if wrong:
        raise SweepError("\n  ".join(["the sweep cannot be run:", *wrong] if wrong[1:] else wrong))
    units, groups = loaded[0]
    return Resolved(spec, tuple(models), tuple(recipes), tuple(sets), units, groups, policy[0])


def needs_hub(spec: SweepSpec, base: Path) -> bool:
    """Whether a sweep has to download a model, a task or rows of a set."""
    if not all(is_local(_beside(m.model, base)) for m in spec.models):
        return True
    if not all(suites.is_own(task) for task in spec.tasks):
        return True
    for choice in spec.calibration:
        name = _beside(choice.set, base, "calibration")
        if lookup.is_set(Path(name)) or (is_data(name) and not _is_shipped(name)):
            continue
        try:
            wanted, _ = lookup.find(name)
        except QuantkitError:
            continue  # reported when names are resolved
        if wanted.avoid or any(source.kind == "hub" for source in wanted.sources):
            return True
    return False


def _beside(name: str, base: Path, kind: str = "") -> str:
    """Paths are relative to the sweep's file; names of what ships stay names."""
    if name == "demo" or (kind and name in resources.names(kind)):
        return name
    path = expanded(name)
    stem, plus, addition = name.rpartition("+")  # after a recipe's file
    on_top = bool(plus) and "/" not in addition and (base / stem).is_file()
    if not path.is_absolute() and ((base / path).exists() or on_top):
        return str((base / path).absolute())
    return str(path) if name.startswith("~") else name


def _is_shipped(name: str) -> bool:
    return name in resources.names("calibration")


def _model(spec: ModelSpec, base: Path) -> Model:
    name = _beside(spec.model, base)
    if is_local(name):
        source = ModelSource.open(name, spec.revision, spec.trust_remote_code)
        identity, place, revision = source.fingerprint, source.place, None
    else:
        # Weights stay where they are: workers download them themselves.
        folder = locate(name, spec.revision, weights=False)
        identity, place, revision = f"{name}@{folder.name}", name, folder.name
        if not (folder / "config.json").is_file():
            raise SourceError(f"{name} has no config.json; is it a model?")
    return Model(spec.label, place, revision, identity, spec.trust_remote_code, tuple(spec.after))


def _set(choice: SetChoice, base: Path) -> Calibration:
    name = _beside(choice.set, base, "calibration")
    part = {"samples": choice.samples, "length": choice.length}
    if name == "-":
        raise DataError("a sweep reads no calibration set from standard input: give a file")
    if lookup.is_set(Path(name)):
        from quantkit.calibration.calibration_set import read_manifest

        manifest = read_manifest(Path(name))
        decisive = {"built": manifest.digest, "files": manifest.files, **part}
        return Calibration(choice.label, decisive, {"folder": str(Path(name).absolute()), **part})
    wanted, start = lookup.find(name)
    if any(source.kind == "stdin" for source in wanted.sources):
        raise DataError(f"{name} reads standard input, which a sweep cannot; give a file")
    if wanted.avoid and (missing := [a for a in wanted.avoid if is_data(a)]):
        start_of = [str((start / a).absolute()) for a in missing]
        wanted = set_spec.changed(
            wanted, {"avoid": [*start_of, *(a for a in wanted.avoid if a not in missing)]}, name
        )
    changes = {"n_samples": choice.samples, "max_length": choice.length}
    wanted = set_spec.changed(wanted, {k: v for k, v in changes.items() if v is not None}, name)
    content = json.loads(wanted.model_dump_json())
    work = {"spec": content, "base": str(start.absolute()), "name": choice.label}
    return Calibration(choice.label, {"spec": content, "data": _data(wanted, start)}, work)


def _data(wanted: set_spec.SetSpec, base: Path) -> dict[str, str]:
    """A set's data besides its own definition, since changed data makes another set."""
    paths = [s.path for s in wanted.sources if isinstance(s, set_spec.Files)]
    found: dict[str, str] = {}
    for path in (*paths, *(name for name in wanted.avoid if is_data(name))):
        whole = (base / expanded(path)).absolute()
        for file in files.find(whole):  # the same names wherever the command is run
            found[f"{path} {os.path.relpath(file, whole.parent)}"] = sha256_of(file)
    if any(isinstance(source, set_spec.Python) for source in wanted.sources):
        found["python"] = platform.python_version()  # the version whose texts these are
    return found


def _units(tasks: Sequence[str]) -> tuple[tuple[Unit, ...], dict[str, dict[str, Any]]]:
    groups: dict[str, dict[str, Any]] = {}
    if not all(suites.is_own(task) for task in tasks):  # ours are not groups
        task_names.check(tasks)
        with lmeval.quiet():
            groups = lmeval.groups(tasks)
    units: dict[str, Unit] = {}
    for asked in suites.expanded(tasks):
        for task in _leaves(asked, groups):
            units.setdefault(task, Unit(task, asked))
    return tuple(units.values()), groups


def _leaves(name: str, groups: dict[str, dict[str, Any]]) -> list[str]:
    if name not in groups:
        return [name]
    return [leaf for member in groups[name]["members"] for leaf in _leaves(member, groups)]


def _policy(name: str | None, base: Path) -> dict[str, Any] | None:
    if name is None:
        return None
    if name == "default":
        return {"text": None}
    path = Path(_beside(name, base))
    policies.load(path)
    return {"text": path.read_text(encoding="utf-8")}
