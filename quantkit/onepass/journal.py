"""Which blocks of an unfinished checkpoint are done, so that a stopped run can resume.

One small file per block, written after the block's tensors are on disk: its presence means that the
block is finished. Hidden states are not stored; finished blocks are replayed from their own
tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from quantkit.errors import StorageError
from quantkit.export.manifest import Layer
from quantkit.model.shards import ShardWriter, TensorSpec, read_header, write_whole
from quantkit.onepass.mark import DIGEST, FOLDER, key_in, mark
from quantkit.parsing import parse_json
from quantkit.storage import write_json

NOTES = "notes.json"


class Journal:
    """The finished blocks of one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.layers: dict[str, Layer] = {}
        self.tensors: set[str] = set()
        """Names of the tensors that finished blocks wrote."""
        self.scales: dict[str, torch.Tensor] = {}
        self.n_done = 0
        while (path := self._path(self.n_done)).is_file():
            block = parse_json(path.read_bytes())
            for name, layer in block["layers"].items():
                self.layers[name] = Layer.model_validate(layer)
            self.tensors.update(block["tensors"])
            scales = path.with_suffix(".scales")
            if scales.is_file():
                self.scales |= {n: t.read() for n, t in read_header(scales).items()}
            self.n_done += 1

    @classmethod
    def open(cls, scratch: Path, key: Mapping[str, str]) -> "Journal":
        """The journal in a scratch folder; one that belongs to another run is refused."""
        return cls(claim(scratch, key))

    def record(
        self,
        index: int,
        layers: Mapping[str, Layer],
        scales: Mapping[str, torch.Tensor],
        tensors: Sequence[str],
    ) -> None:
        """Record a finished block; its tensors must be on disk already."""
        path = self._path(index)
        if scales:
            target = path.with_suffix(".scales")
            target.unlink(missing_ok=True)
            specs = [TensorSpec(name, "F32", tuple(t.shape)) for name, t in scales.items()]
            writer = ShardWriter(target, specs)
            for name, tensor in scales.items():
                writer.write(name, tensor)
            writer.close()
        described = {name: layer.model_dump(mode="json") for name, layer in layers.items()}
        write_json(path, {"layers": described, "tensors": list(tensors)})
        self.layers |= layers
        self.scales |= scales
        self.n_done = index + 1

    @property
    def notes(self) -> list[str]:
        """What a stage after the blocks has to say of the checkpoint."""
        path = self._folder / NOTES
        return list(parse_json(path.read_bytes())) if path.is_file() else []

    def keep_notes(self, notes: Sequence[str]) -> None:
        """Store them, before the stage's result."""
        write_json(self._folder / NOTES, list(notes))

    def store(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store the result of a stage after the blocks, before anything is done with it."""
        write_whole(self._folder / name, tensors)

    def stored(self, name: str) -> dict[str, torch.Tensor] | None:
        """The same, from an earlier run; None where none got that far."""
        path = self._folder / name
        if not path.is_file():
            return None
        return {name: tensor.read() for name, tensor in read_header(path).items()}

    def stored_parts(self, name: str) -> dict[str, Callable[[], torch.Tensor]]:
        """The same, each tensor read when asked for; empty where none got that far."""
        path = self._folder / name
        if not path.is_file():
            return {}
        return {name: tensor.read for name, tensor in read_header(path).items()}

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:05d}.json"


def claim(scratch: Path, key: Mapping[str, str]) -> Path:
    """The folder of a run's journal; one that belongs to another run is refused."""
    found = key_in(scratch)
    if found is None:
        mark(scratch, key)
        found = key
    if changed := [_difference(what, found, key) for what in key if found.get(what) != key[what]]:
        raise StorageError(
            f"{scratch} holds an unfinished run with another {' and '.join(changed)}; "
            "run that again to finish it, or use --force to start over"
        )
    return scratch / FOLDER


def _difference(what: str, found: Mapping[str, str], key: Mapping[str, str]) -> str:
    """What differs, and how, where the key says that in words."""
    there, here = (each.get(what, "").partition(DIGEST)[0::2] for each in (found, key))
    if not (there[1] and here[1]):
        return what
    how = f"{there[0]}, not {here[0]}" if there[0] != here[0] else f"{here[0]}, but others"
    return f"{what} ({how})"
