"""Perplexity of GGUF files, ours against files whose blocks ggml itself made.

    python benchmarks/gguf_quality.py --model DIR --calibration FILE --text FILE [--out FILE]

Each type is written four times: with and without an importance matrix from one pass over the
calibration text, blocks searched by us and blocks searched by ggml on the same tensors with the
same matrix. The perplexity is that of the numbers the files hold, over windows of 2,048 tokens.
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gguf import GGMLQuantizationType

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import ggml_judge
from quality import perplexity_of
from recording import write

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.gguf import blocks
from quantkit.gguf.values import FLOATS
from quantkit.model.source import ModelSource
from quantkit.offline import without_hub
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import load

TYPES = ("q8_0", "q6_k", "q4_k_m", "q2_k", "q4_1")


@contextmanager
def searched_by_ggml() -> Iterator[None]:
    """Files written inside have ggml's blocks; all else about them is ours."""
    ours = blocks.quantize

    def theirs(
        weight: torch.Tensor, kind: GGMLQuantizationType, importance: torch.Tensor | None = None
    ) -> torch.Tensor:
        if kind in FLOATS:
            return ours(weight, kind, importance)
        return ggml_judge.quantize(weight, kind, importance).to(weight.device)

    blocks.quantize = theirs
    try:
        yield
    finally:
        blocks.quantize = ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--types", nargs="*", default=TYPES)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--origin", help="what the source's weights went through before, if known")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    without_hub()
    source = ModelSource.open(args.model)
    recipes = [load(f"gguf-{name}") for name in args.types]
    choice = CalibrationChoice(args.calibration, args.samples, args.length)
    rows: list[dict] = [{"type": name} for name in args.types]
    result = {
        "what": "perplexity by windows of GGUF files, ours and with ggml's own blocks",
        "model": Path(args.model).name,
        "origin": args.origin,
        "calibration": f"{Path(args.calibration).name}, {args.samples} x {args.length}",
        "text": args.text.name,
        "source": perplexity_of(source, args.text, args.length, args.device),
        "types": rows,
        "device": devices.describe(devices.choose(args.device)),
        "machine": platform.machine(),
        "versions": versions(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        for importance in (True, False):
            calibration = choice if importance else None
            ours, theirs = (Path(scratch) / f"{side}-{importance}" for side in ("ours", "ggml"))
            made = quantize(source, recipes, ours, args.device, calibration=calibration)
            with searched_by_ggml():
                peers = quantize(source, recipes, theirs, args.device, calibration=calibration)
            for row, one, other in zip(rows, made, peers, strict=True):
                found = [
                    perplexity_of(checkpoint, args.text, args.length, args.device)
                    for checkpoint in (one, other)
                ]
                row["with importance" if importance else "without"] = {
                    "ours": found[0],
                    "ggml": found[1],
                    "gap_percent": 100 * (found[0] / found[1] - 1),
                }
                print(json.dumps(row), flush=True)
                if args.out:
                    write(args.out, result)


if __name__ == "__main__":
    main()
