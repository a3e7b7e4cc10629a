"""Where the time of writing a GGUF file goes, from a model on disk to a file on disk.

    python benchmarks/gguf_writing.py [--blocks 32 --recipe gguf-q4_k_m] [--work DIR] [--out FILE]

Makes a Llama-shaped checkpoint of random weights with importance made up, since neither changes
the work. The conversion runs as `quantize` runs it, first and again. Then every part of it runs
alone, one tensor after another, on both sides of a wait for the GPU; and the same number of bytes
is read and written plainly, which nothing that goes from disk to disk can beat.
"""

import argparse
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from data_free import add_shape, make_model
from recording import tell

from quantkit import device as devices
from quantkit import grid, recipe
from quantkit.export.manifest import versions
from quantkit.gguf import blocks, conversion, plan, values
from quantkit.gguf.layout import Layout
from quantkit.gguf.writer import GGUFFile
from quantkit.model.source import ModelSource
from quantkit.progress import Silent
from quantkit.recipe import GGUFRecipe

CHUNK_BYTES = 64 << 20


class Clock:
    """Seconds by part; the GPU's work counts where it was asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = self.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - started


def in_parts(
    made: plan.GGUFPlan,
    path: Path,
    metadata: dict[str, Any],
    importance: dict[str, torch.Tensor],
    device: torch.device,
) -> dict[str, float]:
    """The steps of a conversion, none beside another."""
    clock = Clock(device)
    tensors = made.layout.tensors
    file = GGUFFile(path, metadata, [(t.name, t.shape, made.kinds[t.name]) for t in tensors])
    for tensor in tensors:
        kind = made.kinds[tensor.name]
        with clock.part("read, and copy to the device"):
            weight = made.layout.build(tensor.name, device)
        with clock.part("search"):
            weight = weight.reshape(-1, weight.shape[-1])
            data = blocks.quantize(weight, kind, importance.get(tensor.name))
        with clock.part("copy back, and write"):
            file.write(tensor.name, data)
        if kind not in values.FLOATS:
            with clock.part("check against the weights"):
                grid.relative_error(weight, values.dequantize(data, kind))
    with clock.part("flush and hash what is left"):
        file.close()
    return clock.seconds


def read_plainly(folder: Path) -> float:
    """Seconds to read all of a model's files, whose pages are held by the cache if they fit."""
    started = time.perf_counter()
    buffer = bytearray(CHUNK_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def write_plainly(path: Path, size: int) -> float:
    """Seconds to write a file of a size and flush it."""
    data = os.urandom(CHUNK_BYTES)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for left in range(size, 0, -CHUNK_BYTES):
            file.write(data[:left])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--recipe", default="gguf-q4_k_m")
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="other numbers to try")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--work", type=Path, help="where there is room; default: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device) if args.device else devices.choose()
    wanted = recipe.load(args.recipe)
    assert isinstance(wanted, GGUFRecipe), f"{args.recipe} is not a GGUF recipe"
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        folder, path = Path(scratch) / "model", Path(scratch) / "model.gguf"
        make_model(folder, args.blocks, args.hidden, args.intermediate, args.vocabulary)
        source = ModelSource.open(str(folder))
        layout = Layout.of(source)
        importance = {
            t.name: torch.rand(t.shape[-1]) + 0.1 for t in layout.tensors if t.module is not None
        }
        made = plan.make(layout, wanted, True)
        metadata = conversion.metadata(layout, wanted, source)

        def convert() -> None:
            path.unlink(missing_ok=True)
            conversion.write(made, path, metadata, importance, device, Silent())

        seconds = {"first, with kernels to compile": timed(convert), "again": timed(convert)}
        usual = conversion.GPU_WORKERS
        for conversion.GPU_WORKERS in args.workers:
            seconds[f"with {conversion.GPU_WORKERS} workers"] = timed(convert)
        conversion.GPU_WORKERS = usual
        size = path.stat().st_size
        path.unlink()
        parts = in_parts(made, path, metadata, importance, device)
        path.unlink()
        plain = {"read": read_plainly(folder), "write": write_plainly(path, size)}
    found = {
        "what": "a model on disk to a GGUF file on disk, and where its time goes",
        "recipe": wanted.name,
        "blocks": args.blocks,
        "hidden": args.hidden,
        "intermediate": args.intermediate,
        "vocabulary": args.vocabulary,
        "weights": sum(math.prod(t.shape) for t in layout.tensors),
        "read_bytes": source.size_bytes,
        "written_bytes": size,
        "workers": usual if device.type == "cuda" else None,
        "seconds": seconds,
        "parts_one_after_another": parts,
        "plain": plain,
        "times_the_plain_bytes": seconds["again"] / sum(plain.values()),
        "device": devices.describe(device),
        "machine": platform.machine(),
        "versions": versions(),
    }
    tell(found, args.out)


if __name__ == "__main__":
    main()
