"""Does a chosen calibration set stand for its pool better than random draws do?

    python benchmarks/calibration_choice.py --model MODEL --source chat=FILE --source web=FILE \\
        --out benchmarks/results/calibration_choice.json

Builds sets from the given files with `quantkit calibrate build` and records the figures that every
set carries: how far it is from its pool, and the mean of the same for random draws.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recording import ROOT, write

from quantkit.export.manifest import versions

N_SAMPLES = 256
SETS = {"2,048 tokens, packed": (2048, "pack"), "512 tokens, packed": (512, "pack"),
        "512 tokens, padded": (512, "pad")}  # fmt: skip


def build(model: str, sources: dict[str, Path], length: int, short: str) -> dict[str, Any]:
    """The manifest of one set, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            "summary": "a pool to choose from",
            "sources": [
                {"kind": "files", "path": str(path.resolve()), "name": name}
                for name, path in sources.items()
            ],
            "n_samples": N_SAMPLES,
            "max_length": length,
            "short": short,
            "avoid": [],
        }
        # JSON is YAML, too.
        Path(folder, "pool.yaml").write_text(json.dumps(spec))
        command = [sys.executable, "-m", "quantkit", "calibrate", "build", f"{folder}/pool.yaml"]
        command += ["--model", model, "-o", f"{folder}/set", "--quiet"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        started = time.monotonic()
        subprocess.run(command, check=True, env=environment)
        manifest = json.loads(Path(folder, "set", "calibration.json").read_bytes())
    return manifest | {"seconds": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--source", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sources = {name: Path(path) for name, path in (s.split("=", 1) for s in args.source)}
    sets = {}
    for name, (length, short) in SETS.items():
        made = build(args.model, sources, length, short)
        sets[name] = {
            "length": made["length"],
            "n_samples": made["n_samples"],
            "rows": {source["name"]: source["rows"] for source in made["sources"]},
            "figures": made["figures"],
            "random": made["random"],
            "seconds": made["seconds"],
        }
        print(name, json.dumps(sets[name]), flush=True)
    result = {
        "what": "how far a chosen calibration set is from its pool, and random draws are",
        "model": Path(args.model).name,
        "sets": sets,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": versions(),
    }
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
