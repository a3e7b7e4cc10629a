"""A whole model from disk to disk, as a user runs it, and where the seconds go.

    python benchmarks/whole_model.py [--shape 8b] [--caches cold,warm] [-r A,B -r C] [--out FILE]
        [--kernels DIR]

Weights are random and the text is made up: the work does not depend on them. Times the command
itself, imports included, splits the wall clock by stages (stages.py), and takes memory from the
manifests. With cold caches compiled kernels are not there and the model's files are dropped from
the page cache; Python's own files stay there.
"""

import argparse
import json
import os
import platform
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from data_free import add_shape, make_model
from recording import write

from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import versions

WORDS = "block of weights rounds to its nearest number and the rest makes up for what was lost"
WORDS_A_LINE = 1000


def make_text(path: Path, n_words: int) -> None:
    """Lines that have little in common, or most of them would count as near-duplicates."""
    rng = random.Random(0)
    words = [
        *WORDS.split(),
        *("".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(10_000)),
    ]
    lines = (
        " ".join(rng.choices(words, k=WORDS_A_LINE)) for _ in range(-(-n_words // WORDS_A_LINE))
    )
    path.write_text("\n".join(lines))


SHAPES = {
    "1.5b": {"blocks": 28, "hidden": 1536, "intermediate": 8960, "vocabulary": 151936},
    "8b": {"blocks": 32, "hidden": 4096, "intermediate": 14336, "vocabulary": 128256},
}
STAGES = Path(__file__).with_name("stages.py")


def program(limit: float | None, stages: Path) -> list[str]:
    """The command a user types, watched; under a limit the allocator refuses what is beyond it."""
    if limit is None:
        return [sys.executable, str(STAGES), str(stages)]
    share = min(1.0, limit * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    code = (
        "import runpy, torch; "
        f"torch.cuda.set_per_process_memory_fraction({share}); "
        f"runpy.run_path({str(STAGES)!r}, run_name='__main__')"
    )
    return [sys.executable, "-c", code, str(stages)]


def drop(folder: Path) -> None:
    """Have the system forget the contents of a folder's files."""
    for path in folder.iterdir():
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--shape", choices=SHAPES, help="instead of the four sizes")
    parser.add_argument("--caches", default="warm", help="cold, warm or cold,warm, one run each")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--offload", default="auto")
    parser.add_argument("--device-limit", type=float, help="GB of device memory the run may take")
    parser.add_argument("-r", "--recipe", action="append", help="a run: recipes with commas")
    parser.add_argument("--kernels", type=Path, help="a cache of compiled kernels to go on with")
    parser.add_argument("--folder", type=Path, help="where there is room; default: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name, size in SHAPES.get(args.shape, {}).items():
        setattr(args, name, size)
    runs = [names.split(",") for names in args.recipe or ["gptq-w4a16,awq-w4a16,fp8-dynamic"]]
    found = []
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        model, text = Path(scratch) / "model", Path(scratch) / "text.txt"
        make_model(model, args.blocks, args.hidden, args.intermediate, args.vocabulary)
        make_text(text, 2 * args.samples * args.length)
        for recipes in runs:
            for caches in args.caches.split(","):
                kernels = args.kernels or Path(scratch) / "kernels"
                if caches == "cold":
                    shutil.rmtree(kernels, ignore_errors=True)
                    drop(model)
                made = Path(scratch) / "out"
                run = measure(args, model, text, made, recipes, kernels)
                found.append({"caches": caches, **run})
                print(json.dumps(found[-1]), flush=True)
                shutil.rmtree(made)
                if args.out:
                    write(args.out, {"what": "the whole command, from disk to disk", "runs": found})


def measure(
    args: argparse.Namespace, model: Path, text: Path, out: Path, recipes: list[str], kernels: Path
) -> dict[str, Any]:
    """One run of the command, as its manifests and a clock tell of it."""
    stages = out.with_name("stages.json")
    command = [*program(args.device_limit, stages), "quantize", str(model), "-o", str(out)]
    command += [part for name in recipes for part in ("-r", name)]
    command += ["--calibration", str(text), "--samples", str(args.samples)]
    command += ["--length", str(args.length), "--offload", args.offload, "--device", args.device]
    started = time.monotonic()
    environment = os.environ | {"TRITON_CACHE_DIR": str(kernels)}
    subprocess.run(command, check=True, env=environment)
    seconds = time.monotonic() - started
    told = json.loads(stages.read_text())
    told["main"]["Python's start and end"] = seconds - told["seconds"]
    manifests = [Checkpoint.open(out / name).manifest for name in recipes]
    return {
        "blocks": args.blocks,
        "hidden": args.hidden,
        "intermediate": args.intermediate,
        "samples": args.samples,
        "length": args.length,
        "offload": args.offload,
        "device_limit_bytes": args.device_limit and int(args.device_limit * 1e9),
        "recipes": recipes,
        "seconds": seconds,
        "stages": told,
        "stage_seconds": manifests[0].stage_seconds,
        "peak_device_bytes": manifests[0].peak_device_bytes,
        "peak_host_bytes": manifests[0].peak_host_bytes,
        "written_bytes": sum(m.size_bytes for m in manifests),
        "device": manifests[0].device,
        "machine": platform.machine(),
        "versions": versions(),
    }


if __name__ == "__main__":
    main()
