"""Seconds a block of the calibrated pass, on blocks of an 8B Llama's shape.

    python benchmarks/one_pass.py [--blocks 4 --samples 128 --length 2048] [--sweep 32 64 256]

Weights and tokens are random: the work does not depend on them. Each recipe runs alone, then all
together; the time of a block is the median over all blocks but the first, as the pass reports them.
"""

import argparse
import gc
import itertools
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from data_free import make_model
from recording import write

from quantkit import device as devices
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.export.folder import open_folder
from quantkit.export.manifest import versions
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.onepass.journal import Journal
from quantkit.onepass.onepass import Pass, quantize_blocks
from quantkit.plan import checkpoint as planning
from quantkit.progress import Silent
from quantkit.recipe import Recipe

FIVE = ["gptq-w4a16", "awq-w4a16", "awq-gptq-w4a16", "int8-w8a8", "fp8-static"]
RUNS = {
    "gptq": (["gptq-w4a16"], "never"),
    "awq": (["awq-w4a16"], "never"),
    "together": (FIVE, "never"),
    "gptq on host": (["gptq-w4a16"], "always"),
    "awq on host": (["awq-w4a16"], "always"),
    "together on host": (FIVE, "always"),
    "nvfp4": (["nvfp4"], "never"),
    "mxfp4": (["mxfp4"], "never"),
    "w4afp8": (["w4afp8"], "never"),
}


class Watch(Silent):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, label: str, total: int, unit: str = "bytes") -> None:
        torch.cuda.synchronize()
        self.times = [time.monotonic()]

    def advance(self, amount: int) -> None:
        if amount == 1:
            torch.cuda.synchronize()
            self.times.append(time.monotonic())


def measure(
    source: ModelSource, names: list[str], offload: str, tokens: torch.Tensor, out: Path
) -> dict:
    architecture = Architecture.of(source.folder)
    stored = architecture.stored(source)
    plans = [planning.make(architecture, stored, Recipe.load(name)) for name in names]
    n_blocks = source.config["num_hidden_layers"]
    watch = Watch()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    writers = []
    for plan in plans:
        folder = out / plan.recipe.name
        folder.mkdir(parents=True)
        writers.append(open_folder(folder, plan.specs))
    entered = [writer.__enter__() for writer in writers]
    journals = [Journal.open(out / plan.recipe.name, {}) for plan in plans]
    started = time.monotonic()
    samples = CalibrationTokens("random", tokens)
    device = torch.device("cuda")
    wanted = Pass(source, plans, samples, device, entered, journals, progress=watch)
    quantize_blocks(wanted, offload)
    whole = time.monotonic() - started
    for writer in writers:
        writer.__exit__(None, None, None)
    steps = (len(watch.times) - 1) // n_blocks
    marks = watch.times[::steps]
    blocks = [b - a for a, b in itertools.pairwise(marks)]
    return {
        "recipes": names,
        "offload": offload,
        "seconds_in_all": whole,
        "seconds_by_block": blocks,
        "seconds_a_block": statistics.median(blocks[1:]),
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
    }


def tokens_of(n_samples: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 32000, (n_samples, length), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--runs", nargs="*", default=list(RUNS)[:6])
    parser.add_argument("--sweep", type=int, nargs="*", default=[], help="other sample counts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokens = tokens_of(args.samples, args.length)
    result = {
        "what": "seconds a block of the calibrated pass, blocks of an 8B Llama's shape",
        "samples": args.samples,
        "length": args.length,
        "device": devices.describe(torch.device("cuda")),
        "machine": platform.machine(),
        "versions": versions(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch) / "model", args.blocks, 4096, 14336, 32000)
        source = ModelSource.open(str(Path(scratch) / "model"))
        for name in args.runs:
            out = Path(scratch) / "out"
            result[name] = measure(source, *RUNS[name], tokens, out)
            shutil.rmtree(out)
            print(name, json.dumps(result[name]), flush=True)
        for n_samples in args.sweep:
            fewer = tokens_of(n_samples, args.length)
            for name in ("gptq", "awq"):
                out = Path(scratch) / "out"
                point = {"samples": n_samples, **measure(source, *RUNS[name], fewer, out)}
                result.setdefault("sweep", []).append(point)
                shutil.rmtree(out)
                print(name, n_samples, point["seconds_a_block"], flush=True)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
