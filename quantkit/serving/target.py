"""What is to be served: a checkpoint of ours, a model as it is, or a GGUF file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.advise import shape as shapes
from quantkit.advise.shape import ModelShape
from quantkit.errors import CheckpointError, SourceError
from quantkit.model.source import read_config, read_tensors
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe
from quantkit.storage import MANIFEST

IMATRIX = "imatrix.gguf"


@dataclass(frozen=True)
class Target:
    """A model as an engine is given it."""

    path: str
    """A folder, a GGUF file, or a name in the hub."""
    name: str
    """What requests call it."""
    shape: ModelShape | None
    """None where nothing is known of its memory."""
    recipe: AnyRecipe | None
    """None for a model as it is, whose shape has its tensors as they are stored."""
    is_gguf: bool
    has_manifest: bool = False
    can_chat: bool = False
    """Whether a chat template lies beside it."""

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        return Path(self.path).parent if self.is_gguf else Path(self.path)


def planned(shape: ModelShape, recipe: AnyRecipe | None, folder: str) -> Target:
    """A checkpoint that is not made yet."""
    name = folder.rstrip("/").rpartition("/")[2]
    is_gguf = isinstance(recipe, GGUFRecipe)
    path = (
        f"{folder}/{shape.label}-{recipe.gguf}.gguf" if isinstance(recipe, GGUFRecipe) else folder
    )
    return Target(path, name, shape, recipe, is_gguf)


def open_target(path: Path) -> Target:
    """What lies at a path; weights are not read."""
    if path.suffix == ".gguf" and path.is_file():
        return Target(str(path), path.stem, None, None, is_gguf=True, can_chat=True)
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}; give a checkpoint's, or a GGUF file")
    can_chat = (path / "chat_template.jinja").is_file() or _has_template(path)
    own = _read(path / MANIFEST) if (path / MANIFEST).is_file() else None
    files = [f for f in sorted(path.glob("*.gguf")) if f.name != IMATRIX]
    if own is None:
        if files and not any(path.glob("*.safetensors")):
            if len(files) > 1:
                names = ", ".join(f.name for f in files)
                raise CheckpointError(f"{path} holds several GGUF files ({names}); name one")
            return open_target(files[0])
        shape = _stored(path, read_config(path))
        return Target(str(path), path.resolve().name, shape, None, False, False, can_chat)
    recipe = _recipe(own, path)
    name = path.resolve().name
    if isinstance(recipe, GGUFRecipe):
        if len(files) != 1:
            raise CheckpointError(f"{path} does not hold one GGUF file; run `quantkit verify`")
        place = str(files[0])
        shape = shapes.from_config(read_config(path), name)
        return Target(place, name, shape, recipe, True, True, can_chat)
    config = read_config(path)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    place = str(path)
    try:
        return Target(place, name, shapes.from_config(plain, name), recipe, False, True, can_chat)
    except SourceError:  # a family whose shapes follow from its tensors only
        return Target(place, name, _stored(path, config), None, False, True, can_chat)


def _stored(path: Path, config: dict[str, Any]) -> ModelShape:
    """A shape whose tensors are those of the files, packed or not."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    return shapes.from_tensors(plain, read_tensors(path).values(), path.resolve().name)


def _recipe(manifest: dict[str, Any], path: Path) -> AnyRecipe:
    data = manifest.get("recipe")
    if not isinstance(data, dict):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it has no recipe")
    kind: type[Recipe] | type[GGUFRecipe] = GGUFRecipe if "gguf" in data else Recipe
    return kind.validated(data, path / MANIFEST)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return data


def _has_template(path: Path) -> bool:
    file = path / "tokenizer_config.json"
    return file.is_file() and "chat_template" in _read(file)
