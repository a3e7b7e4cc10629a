"""A model to serve: a folder, a GGUF file or the demo."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit import resources
from quantkit.errors import EngineError, QuantkitError
from quantkit.export import foreign_gguf
from quantkit.export.manifest import Manifest, is_checkpoint
from quantkit.model.source import ModelSource, placed


@dataclass(frozen=True)
class Model:
    """A model to serve."""

    path: Path
    name: str
    digest: str | None

    @classmethod
    def of(cls, path: Path) -> "Model":
        """A folder, a GGUF file or `demo`; quantkit checkpoints are identified by their digest."""
        if str(path) == "demo" and not path.exists():
            return replace(cls.of(resources.DEMO_MODEL), name="demo")
        given, path = path, placed(path)
        if not path.exists():
            raise EngineError(
                f"there is no folder or file {path}; name a checkpoint's folder, a GGUF "
                "file or a hub id, or measure a server with --backend server"
            )
        folder = path if path.is_dir() else path.parent
        name = path.resolve().name if path.is_dir() else path.stem
        if path != given and path.is_dir():  # a snapshot folder is named after its commit
            name = given.name
        if is_checkpoint(folder):
            manifest = Manifest.read(folder)
            return cls(path, manifest.name, manifest.digest)
        digest = None
        with suppress(QuantkitError):  # what quantkit cannot read may still be served
            if (file := foreign_gguf.file_of(path)) is not None:
                from quantkit.gguf.reader import read_file

                digest = foreign_gguf.digest_of(read_file(file))
            elif path.is_dir() and any(path.glob("*.safetensors")):
                digest = ModelSource.open(str(path), requantize=True).fingerprint
        return cls(path, name, digest)
