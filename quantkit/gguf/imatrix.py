"""llama.cpp's importance matrix: how large the inputs of every weight are, per column.

For every weight tensor it holds the mean square of each input column, gathered by running text
through the model. Rounding then favours the columns that matter. It is exchanged as a GGUF file of
sums and counts; llama.cpp's older format is still read here.
"""

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import gguf
import torch

from quantkit.errors import DataError
from quantkit.gguf.reader import GGUF, MAGIC, read_file
from quantkit.storage import IMATRIX, clear_halves_of, guarded

TYPE = "imatrix"
SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS = "imatrix.datasets"
CHUNK_COUNT = "imatrix.chunk_count"
CHUNK_SIZE = "imatrix.chunk_size"
DEFAULT_CHUNK = 512  # tokens; the old format counts chunks without saying how long they are
FEW = 1000
"""With fewer observations than this a column's mean square is mostly noise."""
FILE = IMATRIX
MOST = 2**53  # observations; no text is that long
UNOBSERVED = ("token_embd.weight", "output.weight")
"""Tensors that llama.cpp's tool skips by default."""
STACKED = ("_exps.", "_k_b.", "_v_b.")


@dataclass(frozen=True)
class ImportanceMatrix:
    """Mean squares of the inputs, by the GGUF name of the weight they are multiplied with."""

    values: Mapping[str, torch.Tensor]
    """float32 [columns], or [experts, columns]; ones for an expert that was never called."""
    counts: Mapping[str, torch.Tensor]
    """int64 [1] or [experts]: the number of observed inputs."""
    datasets: tuple[str, ...] = ()
    """The texts it was computed from."""
    chunk_size: int = DEFAULT_CHUNK
    """Tokens per chunk of text."""

    @classmethod
    def read(cls, path: Path) -> "ImportanceMatrix":
        """Read a file in either format."""
        try:
            with path.open("rb") as stream:
                if stream.read(len(MAGIC)) != MAGIC:
                    return _Old(path, stream).parse()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        return _from_gguf(read_file(path))

    def write(self, path: Path) -> None:
        """Write it as llama.cpp's tool does: GGUF, sorted by name."""
        clear_halves_of(path)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        writer = gguf.GGUFWriter(scratch, TYPE)
        del writer.kv_data[0]["general.architecture"]  # a matrix is not a model
        writer.add_type(TYPE)
        # llama.cpp requires the key, and the gguf package does not write empty lists.
        writer.add_array(DATASETS, list(self.datasets) or [""])
        most = max((int(count.max()) for count in self.counts.values()), default=0)
        writer.add_uint32(CHUNK_COUNT, most // self.chunk_size)
        writer.add_uint32(CHUNK_SIZE, self.chunk_size)
        for name in sorted(self.values):
            count = self.counts[name]
            sums = self.values[name].double().reshape(len(count), -1) * count[:, None]
            sums = sums.float() if len(count) > 1 else sums[0].float()
            column = count[:, None] if len(count) > 1 else count
            writer.add_tensor(name + SUMS, sums.contiguous().numpy())
            writer.add_tensor(name + COUNTS, column.float().contiguous().numpy())
        with guarded(path):
            try:
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_tensors_to_file()
                writer.close()
                scratch.replace(path)
            finally:
                scratch.unlink(missing_ok=True)

    @property
    def digest(self) -> str:
        """A hash of everything that weights errors."""
        total = hashlib.sha256()
        for name in sorted(self.values):
            total.update(f"{name} {tuple(self.values[name].shape)}".encode())
            total.update(self.values[name].contiguous().numpy().tobytes())
        return total.hexdigest()

    def missing(self, names_to_columns: Mapping[str, int]) -> list[str]:
        """The tensors that the matrix does not cover."""
        return [name for name in names_to_columns if name not in self.values]

    def check(self, names_to_columns: Mapping[str, int]) -> list[str]:
        """Warnings for using it on these tensors; a matrix of another model is refused."""
        for name, columns in names_to_columns.items():
            width = self.values[name].shape[-1] if name in self.values else columns
            # Some entries of stacked weights do not say where one weight's columns end.
            if width != columns and (width % columns or not any(part in name for part in STACKED)):
                raise DataError(
                    f"the importance matrix has {width} columns for {name}, which has {columns}: "
                    "it was computed for another model"
                )
        missing = [name for name in self.missing(names_to_columns) if name not in UNOBSERVED]
        n_expected = sum(name not in UNOBSERVED for name in names_to_columns)
        if 2 * len(missing) > n_expected:
            raise DataError(
                f"the importance matrix lacks {len(missing)} of {n_expected} tensors, such as "
                f"{missing[0]}: it was computed for another model"
            )
        problems = [f"the importance matrix has no entry for {name}" for name in missing]
        few = {
            name: least
            for name in names_to_columns
            if name in self.counts and (least := int(self.counts[name].min())) < FEW
        }
        if few:
            worst = min(few, key=lambda name: few[name])
            problems.append(
                f"the importance matrix has fewer than {FEW} observations for {len(few)} tensors, "
                f"the fewest for {worst}: {few[worst]}; compute it from more text"
            )
        return problems


def _from_gguf(file: GGUF) -> ImportanceMatrix:
    path, metadata = file.path, file.metadata
    if metadata.get("general.type", TYPE) != TYPE:
        raise DataError(
            f"{path} is not an importance matrix but a GGUF file of type "
            f"{metadata['general.type']!r}"
        )
    values, counts = {}, {}
    names = [name.removesuffix(SUMS) for name in file.tensors if name.endswith(SUMS)]
    for name in names:
        for part in (name + SUMS, name + COUNTS):
            if part not in file.tensors:
                raise DataError(f"{path} has {name + SUMS} but no {part}; compute it again")
            if file.tensors[part].kind != gguf.GGMLQuantizationType.F32:
                raise DataError(f"{path}: {part} is not in F32; compute it again")
        sums, seen = file.dequantized(name + SUMS), file.dequantized(name + COUNTS).reshape(-1)
        if sums.numel() % len(seen):
            raise DataError(f"{path}: {name} has {sums.numel()} sums for {len(seen)} counts")
        _check_finite(path, name, sums)
        _check_finite(path, name, seen)
        if seen.max() > MOST:
            raise DataError(f"{path}: {name} was observed {seen.max():.0e} times; compute it again")
        values[name] = _means(sums.view(len(seen), -1), seen)
        counts[name] = seen.round().long()
    if not values:
        raise DataError(f"{path} is not an importance matrix: it has no tensor named *{SUMS}")
    datasets = metadata.get(DATASETS, [])
    chunk = metadata.get(CHUNK_SIZE, DEFAULT_CHUNK)
    return ImportanceMatrix(
        values,
        counts,
        tuple(str(text) for text in datasets if text) if isinstance(datasets, list) else (),
        chunk if isinstance(chunk, int) and chunk > 0 else DEFAULT_CHUNK,
    )


def _means(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[columns] for one count, [experts, columns] for several."""
    counts = counts.round()[:, None]
    # An expert that no token was routed to: all its columns matter equally.
    means = torch.where(counts > 0, sums / counts.clamp(min=1), 1.0)
    return means if len(means) > 1 else means[0]


def _check_finite(path: Path, name: str, values: torch.Tensor) -> None:
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise DataError(f"{path}: {name} has a value that is negative or NaN; compute it again")


class _Old:
    """A cursor over a file in the old format, which can be recognised only by its lengths adding
    up.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._left = stream.seek(0, os.SEEK_END)
        stream.seek(0)

    def parse(self) -> ImportanceMatrix:
        values, counts = {}, {}
        n_entries = self._number()
        # The smallest possible entry: a name of one letter and one value.
        if not 0 < n_entries * 17 <= self._left:
            self._refuse(f"it claims {n_entries} entries")
        for _ in range(n_entries):
            name = self._text()
            n_chunks, n_values = self._number(), self._number()
            if not name or n_chunks < 0 or n_values < 1:
                self._refuse(f"the entry {name!r:.80} is empty")
            if name in values:
                self._refuse(f"the entry {name!r:.80} occurs twice")
            raw = bytearray(self._take(4 * n_values))
            sums = torch.frombuffer(raw, dtype=torch.float32)
            _check_finite(self._path, name[:80], sums)
            values[name] = sums / max(n_chunks, 1)
            counts[name] = torch.tensor([n_chunks * DEFAULT_CHUNK])
        datasets: tuple[str, ...] = ()
        if self._left:
            self._number()  # total number of chunks
        if self._left:
            datasets = tuple(filter(None, [self._text()]))
        if self._left:
            self._refuse("there is data after its end")
        return ImportanceMatrix(values, counts, datasets)

    def _text(self) -> str:
        try:
            return self._take(self._number()).decode("utf-8")
        except UnicodeDecodeError:
            self._refuse("a name is not UTF-8 text")

    def _number(self) -> int:
        return struct.unpack("<i", self._take(4))[0]

    def _take(self, n: int) -> bytes:
        if not 0 <= n <= self._left:
            self._refuse(f"{n} bytes should follow where {self._left} are left")
        self._left -= n
        raw = self._stream.read(n)
        if len(raw) < n:
            self._refuse("it became shorter while being read")
        return raw

    def _refuse(self, reason: str) -> NoReturn:
        raise DataError(
            f"{self._path} is not an importance matrix or is damaged: {reason}; give the file that "
            "llama.cpp's imatrix tool wrote"
        )
