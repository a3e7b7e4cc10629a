"""What each recipe adds to a block, and which kernels a GPU spends the time on.

    python benchmarks/block_profile.py --out FILE [--recipes A B ...] [--blocks 8]
        [--hidden 1536 --intermediate 8960] [--samples 128 --length 2048]

Every recipe alone, then all in one pass: seconds per block are the difference between models of two
block counts, in a process that has compiled its kernels and loaded its libraries. A last pass over
two blocks is watched by torch's profiler: the GPU's busy seconds beside the wall clock of the same
pass unwatched, how many kernels were launched, and which of them took longest. Weights are random
and the text is made up.
"""

import argparse
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from data_free import make_model
from recording import write
from whole_model import make_text

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import load

RECIPES = (
    "gptq-w4a16",
    "awq-w4a16",
    "awq-gptq-w4a16",
    "int8-w8a8",
    "fp8-static",
    "fp8-dynamic",
    "nvfp4",
    "gguf-q4_k_m",
)
FEW = 2
LISTED = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=8960)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "what": "seconds per block of each recipe alone and of all, and the kernels of all",
        "shape": [args.hidden, args.intermediate],
        "samples": args.samples,
        "length": args.length,
        "device": devices.describe(devices.choose()),
        "machine": platform.machine(),
        "versions": versions(),
        "seconds_per_block": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for blocks in (FEW, args.blocks):
            shape = args.hidden, args.intermediate, args.vocabulary
            make_model(folder / str(blocks), blocks, *shape)
        make_text(folder / "text.txt", 2 * args.samples * args.length)

        def seconds(blocks: int, names: list[str]) -> float:
            shutil.rmtree(folder / "out", ignore_errors=True)
            source = ModelSource.open(str(folder / str(blocks)))
            choice = CalibrationChoice(str(folder / "text.txt"), args.samples, args.length)
            started = time.monotonic()
            quantize(source, list(map(load, names)), folder / "out", calibration=choice)
            return time.monotonic() - started

        seconds(FEW, args.recipes)  # compiles
        for names in ([name] for name in args.recipes):
            more = seconds(args.blocks, names) - seconds(FEW, names)
            result["seconds_per_block"][names[0]] = more / (args.blocks - FEW)
            write(args.out, result)
        few = seconds(FEW, args.recipes)
        more = seconds(args.blocks, args.recipes) - few
        result["seconds_per_block"]["all"] = more / (args.blocks - FEW)
        write(args.out, result)
        result["profile"] = {"blocks": FEW, "seconds_unwatched": few} | watched(
            lambda: seconds(FEW, args.recipes)
        )
        write(args.out, result)


def watched(run: Any) -> dict[str, Any]:
    """Kernels by what they took; on a CPU, torch's operations."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=kinds) as found:
        run()
    took = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, took))
    return {
        "busy_seconds": sum(getattr(row, took) for row in rows) / 1e6,
        "launches": sum(row.count for row in rows),
        "longest": [
            {"name": r.key[:90], "calls": r.count, "seconds": getattr(r, took) / 1e6}
            for r in rows[:LISTED]
        ],
    }


if __name__ == "__main__":
    main()
