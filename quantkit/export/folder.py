"""Writes a checkpoint as a complete Hugging Face folder: config, tokenizer, shards, index,
manifest.
"""

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from quantkit import formats
from quantkit.errors import SourceError
from quantkit.export import manifest
from quantkit.export.manifest import Manifest, StoredFile
from quantkit.model.description import README
from quantkit.model.fused import Place
from quantkit.model.shards import (
    DTYPES,
    ShardWriter,
    StoredTensor,
    TensorSpec,
    as_bytes,
    assign_to_shards,
    file_bytes,
    index_of,
    to_host,
)
from quantkit.model.source import INDEX, ModelSource, side_files
from quantkit.recipe import Recipe
from quantkit.storage import sha256_of, write_json

MAX_SHARD_BYTES = 2 * 10**9
"""Per file. Each is hashed by one thread while it grows, so a fast run fills several at once."""
SCALES_FILE = "folded.scales"
MIXED_FILES = ("recipe.yaml", "sensitivity.json")
"""Files beside a checkpoint whose formats were chosen for a budget: the choice, and its basis."""
OWN_FILES = ("config.json", INDEX, manifest.FILE)


def weight_bytes(specs: Iterable[TensorSpec]) -> int:
    """Size of all files that hold these tensors, headers included."""
    return sum(map(file_bytes, assign_to_shards(specs, MAX_SHARD_BYTES).values()))


class FolderWriter:
    """The weights of one checkpoint while they are written."""

    def __init__(
        self,
        folder: Path,
        specs: Iterable[TensorSpec],
        present: Container[str] = (),
        together: Mapping[str, Place] | None = None,
    ) -> None:
        """`together` has the places of separate experts that are stored in fused tensors."""
        self.folder = folder
        self._experts = _Experts(together or {}, self._write_whole)
        specs, present = self._experts.stored(specs, present)
        self._shards = assign_to_shards(specs, MAX_SHARD_BYTES)
        self._writers: dict[str, ShardWriter] = {}
        self.hashes: dict[str, str] = {}
        """The sha256 of every shard, once closed."""
        self._place: dict[str, ShardWriter] = {}
        try:
            for file, part in self._shards.items():
                if not any(spec.name in present for spec in part):
                    (folder / file).unlink(missing_ok=True)  # left by a run that was stopped early
                writer = ShardWriter(folder / file, part, present)
                self._writers[file] = writer
                self._place.update((spec.name, writer) for spec in part)
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor to its place. May be called from any thread."""
        if name in self._experts.places:
            self._experts.put(name, to_host(tensor))
        else:
            self._place[name].write(name, tensor)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite a tensor that was written."""
        self._place[name].replace(name, tensor)

    def write_bytes(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        """Write part of a tensor to its place."""
        if name in self._experts.places:
            self._experts.put_bytes(name, buffer, offset)
        else:
            self._place[name].write_bytes(name, buffer, offset)

    def _write_whole(self, name: str, buffer: memoryview, offset: int) -> None:
        self._place[name].write_bytes(name, buffer, offset)

    def stored(self, name: str) -> StoredTensor:
        """Location of a tensor, for reading it back."""
        if (place := self._experts.places.get(name)) is not None:
            whole = place.whole.name
            return place.of(self._place[whole].stored(whole), name)
        return self._place[name].stored(name)

    def flush(self) -> None:
        """Flush to disk what was written so far."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flush all shards and write the index."""
        for file in list(self._writers):
            self.hashes[file] = self._writers.pop(file).close()
        if len(self._shards) > 1:
            write_json(self.folder / INDEX, index_of(self._shards))

    def abandon(self) -> None:
        """Close all files after a failure."""
        for writer in self._writers.values():
            writer.abandon()


class _Experts:
    """Layers of experts, collected until one expert's part of a fused tensor is complete."""

    def __init__(
        self, places: Mapping[str, Place], write: Callable[[str, memoryview, int], None]
    ) -> None:
        self.places, self._write = places, write
        self._specs: dict[str, TensorSpec] = {}
        self._begun: dict[tuple[str, int], tuple[torch.Tensor, list[str]]] = {}
        self._parts: dict[str, tuple[bytearray, list[int]]] = {}
        self._lock = threading.Lock()

    def stored(
        self, specs: Iterable[TensorSpec], present: Container[str]
    ) -> tuple[list[TensorSpec], Container[str]]:
        """The tensors of the files, and which of them are there already."""
        result: dict[str, TensorSpec] = {}
        absent: set[str] = set()
        for spec in specs:
            place = self.places.get(spec.name)
            if place is None:
                result[spec.name] = spec
                continue
            self._specs[spec.name] = spec
            result[place.whole.name] = place.whole
            if spec.name not in present:
                absent.add(place.whole.name)
        whole = {place.whole.name for place in self.places.values()} - absent
        there = {name for name in result if name in whole or name in present}
        return list(result.values()), there

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Take one layer; the expert is written with its last one."""
        place, spec = self.places[name], self._specs[name]
        assert tensor.dtype == DTYPES[spec.dtype], f"{name}: {tensor.dtype} is not {spec.dtype}"
        shape = place.whole.shape[1:]
        key = (place.whole.name, place.index)
        with self._lock:
            empty = torch.empty(shape, dtype=tensor.dtype)
            expert, taken = self._begun.setdefault(key, (empty, []))
            place.cut.put(tensor, expert)
            taken.append(name)
            if len(taken) < place.cut.n_parts:
                return
            del self._begun[key]
        self._write(place.whole.name, as_bytes(expert), place.index * expert.nbytes)

    def put_bytes(self, name: str, buffer: memoryview, offset: int) -> None:
        """Take some bytes of one layer."""
        spec = self._specs[name]
        with self._lock:
            data, got = self._parts.setdefault(name, (bytearray(spec.size_bytes), []))
            data[offset : offset + len(buffer)] = buffer
            got.append(len(buffer))
            if sum(got) < spec.size_bytes:
                return
            del self._parts[name]
        self.put(name, torch.frombuffer(data, dtype=DTYPES[spec.dtype]).view(spec.shape))


@contextmanager
def open_folder(
    folder: Path,
    specs: Iterable[TensorSpec],
    present: Container[str] = (),
    together: Mapping[str, Place] | None = None,
) -> Iterator[FolderWriter]:
    """A writer that is closed properly if the work succeeds."""
    writer = FolderWriter(folder, specs, present, together)
    try:
        yield writer
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def write_side_files(folder: Path, source: ModelSource, recipe: Recipe, ignored: list[str]) -> None:
    """Config with the quantisation section, and all other files copied from the source."""
    config = dict(source.config)
    config["quantization_config"] = formats.config(recipe, ignored)
    # Some configs hold infinity, which is not valid JSON but is read by every loader.
    write_json(folder / "config.json", config, allow_nan=True)
    copy_side_files(folder, source, but=OWN_FILES)


def copy_side_files(folder: Path, source: ModelSource, but: Container[str] = (INDEX,)) -> None:
    """Copy config, tokenizer and the like from the source."""
    for path in side_files(source.folder):
        if path.name not in but:
            (folder / path.name).write_bytes(_read(path))


def write_scales(folder: Path, scales: Mapping[str, torch.Tensor]) -> None:
    """Keep folded scales beside the weights, so that a check against the source can undo them.

    The file is in safetensors format under another extension: engines load every file that has it.
    """
    specs = [TensorSpec(name, "F32", tuple(scale.shape)) for name, scale in scales.items()]
    (folder / SCALES_FILE).unlink(missing_ok=True)  # left by a run that was stopped here
    writer = ShardWriter(folder / SCALES_FILE, specs)
    for name, scale in scales.items():
        writer.write(name, scale)
    writer.close()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def hash_files(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, StoredFile]:
    """Hash and size of every file of the model; `known` hashes are reused.

    The manifest cannot hold its own hash, and the card may be edited: scores are keyed by these
    hashes, and neither file changes what the model computes.
    """
    apart = (manifest.FILE, README)
    paths = [p for p in sorted(folder.iterdir()) if p.is_file() and p.name not in apart]
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(lambda p: (known or {}).get(p.name) or sha256_of(p), paths))
    return {
        path.name: StoredFile(sha256=digest, size_bytes=path.stat().st_size)
        for path, digest in zip(paths, hashes, strict=True)
    }


def write_manifest(folder: Path, record: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint."""
    write_json(folder / manifest.FILE, record.to_json())
