"""Does calibration data matter: 4-bit GPTQ and AWQ calibrated on one domain, perplexity on another.

    python benchmarks/calibration_domains.py --model DIR --domain chat=FILE --domain maths=FILE \\
        --domain encyclopaedia=FILE [--samples 128] [--length 512] [--device cpu] [--out FILE]

Each domain's rows are split by a hash of how they begin: four fifths to calibrate on, the rest to
measure on, rendered as the model would be served. A set is built from each domain and one from all.
For every domain the table has the perplexity of the source, and how much it grows when calibrated
on the same domain, on all, and on the others (their mean).
"""

import argparse
import hashlib
import json
import math
import platform
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recording import write

from quantkit import device as devices
from quantkit.calibration.build import Vocabulary, build
from quantkit.calibration.pool import Reading
from quantkit.calibration.reading import files
from quantkit.calibration.reading.recognise import Recogniser
from quantkit.calibration.rendering import Renderer
from quantkit.calibration.spec import SetSpec
from quantkit.export.manifest import versions
from quantkit.model.source import ModelSource
from quantkit.offline import without_hub
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.progress import Silent
from quantkit.recipe import load
from quantkit.scoring import loading

RECIPES = ("gptq-w4a16", "awq-w4a16", "awq-gptq-w4a16")
MIXED = "mixed"


@dataclass(frozen=True)
class Domain:
    """One kind of text: a file to calibrate on, and tokens to measure on."""

    name: str
    calibration: Path
    heldout: list[np.ndarray]


def split(name: str, path: Path, folder: Path, renderer: Renderer, n_tokens: int) -> Domain:
    """Four fifths of the rows to a file, and some tokens of the others."""
    known = Recogniser(name)
    target = folder / f"{name}.jsonl"
    heldout: list[np.ndarray] = []
    left = n_tokens
    with target.open("w") as stream:
        for record in files.read(path):
            row = known(record)
            start = (row.plain if row.kind == "text" else str(row.messages[0]["content"]))[:200]
            if hashlib.sha256(start.encode()).digest()[0] >= 51:
                value = record.value if isinstance(record.value, dict) else {"text": record.value}
                stream.write(json.dumps(value) + "\n")
                continue
            for piece in renderer.pieces(row, random.Random(0))[:2]:
                if left > 0 and len(piece.ids) > 16:
                    heldout.append(piece.ids[:left])
                    left -= len(piece.ids)
    return Domain(name, target, heldout)


@torch.no_grad()
def perplexity(model: Any, pieces: list[np.ndarray]) -> float:
    """Over all tokens of all pieces but each one's first."""
    total, n = 0.0, 0
    for piece in pieces:
        ids = torch.from_numpy(piece.astype(np.int64)).to(model.device)[None]
        logits = model(ids).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        n += ids.shape[1] - 1
    return math.exp(total / n)


def measure(target: Any, domains: list[Domain], device: str) -> dict[str, float]:
    model = loading.load(target, torch.device(device))
    return {domain.name: perplexity(model, domain.heldout) for domain in domains}


def table(values: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Growth of perplexity in percent, by recipe: rows are what is measured on."""
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        grown = {
            on: {by: 100 * (values[by][recipe][on] / values["source"][on] - 1) for by in values
                 if by != "source"}
            for on in names
        }  # fmt: skip
        found[recipe] = {
            on: {
                "matching": grown[on][on],
                "mixed": grown[on][MIXED],
                "wrong": statistics.mean(grown[on][by] for by in names if by != on),
            }
            for on in names
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--domain", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heldout", type=int, default=16_384, help="tokens of each domain")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    without_hub()
    source, model = ModelSource.open(args.model), Vocabulary.of(args.model)
    device = str(devices.choose(args.device))
    renderer = Renderer(model.tokenizer, args.length)
    recipes = [load(name) for name in RECIPES]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        given = dict(pair.split("=", 1) for pair in args.domain)
        domains = [split(n, Path(p), folder, renderer, args.heldout) for n, p in given.items()]
        values: dict[str, Any] = {"source": measure(source, domains, device)}
        print("source", values["source"], flush=True)
        for name in [*given, MIXED]:
            mine = [d for d in domains if name in (MIXED, d.name)]
            sources = [{"kind": "files", "path": str(d.calibration), "weight": 1} for d in mine]
            spec = SetSpec.model_validate(
                {"sources": sources, "n_samples": args.samples, "max_length": args.length}
            )
            build(name, spec, Reading(folder), model, Silent()).write(folder / "sets" / name)
            choice = CalibrationChoice(str(folder / "sets" / name))
            made = quantize(source, recipes, folder / name, device, calibration=choice)
            values[name] = {c.label: measure(c, domains, device) for c in made}
            print(name, values[name], f"{time.monotonic() - started:.0f} s", flush=True)
    result = {
        "what": "growth of perplexity in percent over the source's",
        "model": Path(args.model).name,
        "calibration": f"{args.samples} x {args.length} tokens",
        "heldout_tokens": {d.name: sum(map(len, d.heldout)) for d in domains},
        "growth_percent": table(values, list(given)),
        "perplexity": values,
        "device": devices.describe(torch.device(device)),
        "machine": platform.machine(),
        "versions": versions(),
    }
    print(json.dumps(result["growth_percent"], indent=2))
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
