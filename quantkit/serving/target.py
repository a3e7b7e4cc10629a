"""What is to be served: a quantkit checkpoint, an unquantised model, or a GGUF file."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit import resources
from quantkit.advise import shape as shapes
from quantkit.advise.shape import ModelShape
from quantkit.errors import CheckpointError, SourceError
from quantkit.model.source import placed, read_config, read_tensors
from quantkit.nearby import similar
from quantkit.parsing import parse_json
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe
from quantkit.storage import IMATRIX, MANIFEST, gguf_files, lasting_name


@dataclass(frozen=True)
class Target:
    """A model as it is passed to an engine."""

    path: str
    """A folder, a GGUF file, or a hub id."""
    name: str
    """Its name in requests."""
    shape: ModelShape | None
    """None where its memory is unknown."""
    recipe: AnyRecipe | None
    """None for a model that quantkit did not make."""
    is_gguf: bool
    has_manifest: bool = False
    can_chat: bool = False
    """Whether it has a chat template."""
    is_stored: bool = False
    """Whether the shape has its tensors as stored, packed or not."""
    longest: int | None = None
    """A GGUF file's context length, where nothing else is known about it."""

    @property
    def sized_by(self) -> AnyRecipe | None:
        """The recipe that determines sizes; None where tensors have theirs already."""
        return None if self.is_stored else self.recipe

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return Path(self.path).parent if self.is_gguf else Path(self.path)


def planned(
    shape: ModelShape, recipe: AnyRecipe | None, folder: str, source: str | None = None
) -> Target:
    """A checkpoint that does not exist yet, made from what `quantize` calls `source`."""
    name = folder.rstrip("/").rpartition("/")[2]
    if not isinstance(recipe, GGUFRecipe):
        return Target(folder, name, shape, recipe, False)
    made_of = (source or shape.label).rstrip("/").rpartition("/")[2]
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", made_of).strip("-.")
    path = f"{folder}/{safe}-{recipe.gguf}.gguf"
    return Target(path, name, shape, recipe, True)


def open_target(path: Path) -> Target:
    """What is at a path, or `demo`, or a hub model by its id; weights are not read."""
    if str(path) == "demo" and not path.exists():
        path = resources.DEMO_MODEL
    if (found := placed(path)) != path:
        opened = open_target(found)  # a snapshot's folder is named by its commit
        return opened if opened.is_gguf else replace(opened, name=path.name)
    if path.suffix == ".gguf" and path.is_file():
        if _is_ours(path):
            return open_target(path.parent)
        return _file(path)
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path}; give a checkpoint folder or a GGUF file{similar(path)}"
        )
    can_chat = (path / "chat_template.jinja").is_file() or _has_template(path)
    own = _read(path / MANIFEST) if (path / MANIFEST).is_file() else None
    files = gguf_files(path)
    if own is None:
        if files and not any(path.glob("*.safetensors")):
            if len(files) > 1:
                names = ", ".join(f.name for f in files)
                raise CheckpointError(f"{path} holds several GGUF files ({names}); name one")
            return open_target(files[0])
        return _folder(path, None, can_chat)
    recipe = _recipe(own, path)
    if not isinstance(recipe, GGUFRecipe):
        return _folder(path, recipe, can_chat)
    if len(files) != 1:
        raise CheckpointError(f"{path} does not hold one GGUF file; run `quantkit verify`")
    name = lasting_name(path)
    shape = shapes.from_config(read_config(path), name)
    return Target(str(files[0]), name, shape, recipe, True, True, can_chat)


def _is_ours(path: Path) -> bool:
    """Whether a GGUF file is the one that the manifest next to it describes."""
    manifest = path.parent / MANIFEST
    if path.name == IMATRIX or not manifest.is_file():
        return False
    files = _read(manifest).get("files")
    return isinstance(files, dict) and path.name in files


def _folder(path: Path, recipe: Recipe | None, can_chat: bool) -> Target:
    """A folder of safetensors."""
    name, config = lasting_name(path), read_config(path)
    config.pop("quantization_config", None)  # which would be refused in a source
    if recipe is not None:
        with suppress(SourceError):  # a family whose shapes follow from its tensors only
            shape = shapes.from_config(config, name)
            return Target(str(path), name, shape, recipe, False, True, can_chat)
    shape = shapes.from_tensors(config, read_tensors(path).values(), name)
    return Target(
        str(path), name, shape, recipe, False, recipe is not None, can_chat, is_stored=True
    )


def _file(path: Path) -> Target:
    """A GGUF file made by another tool."""
    from quantkit.gguf.reader import read_file
    from quantkit.serving.gguf_files import described

    file = read_file(path)
    found = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
    longest = found if isinstance(found, int) and found > 0 else None
    shape, recipe = described(file) or (None, None)
    return Target(str(path), path.stem, shape, recipe, True, can_chat=True, longest=longest)


def _recipe(manifest: dict[str, Any], path: Path) -> AnyRecipe:
    data = manifest.get("recipe")
    if not isinstance(data, dict):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it has no recipe")
    kind: type[Recipe] | type[GGUFRecipe] = GGUFRecipe if "gguf" in data else Recipe
    return kind.validated(data, path / MANIFEST)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return data


def _has_template(path: Path) -> bool:
    file = path / "tokenizer_config.json"
    return file.is_file() and "chat_template" in _read(file)
