"""How much a result depends on which samples a calibration set happens to hold.

    python benchmarks/seeds.py --out FILE [--model demo --calibration python-docs]
        [--recipes gptq-w4a16 awq-gptq-w4a16] [--seeds 4] [--windows 400 --length 256] [--work DIR]

Every recipe is calibrated on sets of one specification that differ in their seed alone, and
compared with the source on the same windows of held-out text, as `best_bits.py` does it. Rows have
the change of perplexity and the KL divergence; each recipe's mean and standard deviation say which
differences between recipes mean something. FILE is written after every row, and those that it holds
are not made again.
"""

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import yaml
from fp4 import windows_of
from quality import compare
from recording import recorded

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.resources import find
from quantkit.scoring import loading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="python-docs")
    parser.add_argument("--recipes", nargs="+", default=["gptq-w4a16", "awq-gptq-w4a16"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--work", type=Path, default=Path("seeds"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.source = ModelSource.open(args.model)
    device, windows = devices.choose(args.device), windows_of(args)
    source = loading.load(args.source, device)
    plain = compare(source, source, windows)
    known = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result: dict[str, Any] = {
        "what": "perplexity and KL divergence over seeds of the calibration set",
        "model": args.source.label,
        "calibration": args.calibration,
        "windows": len(windows),
        "length": args.length,
        "device": devices.describe(device),
        "versions": versions(),
        "source": plain,
        "rows": known.get("rows", []),
    }
    args.work.mkdir(parents=True, exist_ok=True)
    specification = yaml.safe_load(find("calibration", args.calibration).read_text())
    for seed in range(args.seeds):
        described = args.work / f"seed-{seed}.yaml"
        described.write_text(yaml.safe_dump(specification | {"seed": seed}))
        missing = [name for name in args.recipes if (name, seed) not in done(result["rows"])]
        if not missing:
            continue
        recipes = [Recipe.load(name) for name in missing]
        choice = CalibrationChoice(str(described))
        out = args.work / f"seed-{seed}"
        for made in quantize(args.source, recipes, out, args.device, calibration=choice):
            found = compare(source, loading.load(made, device), windows)
            change = 100 * (found["perplexity"] / plain["perplexity"] - 1)
            name = made.manifest.recipe.name
            row = {"recipe": name, "seed": seed, "change_percent": change, **found}
            result["rows"].append(row)
            result["recipes"] = spread(result["rows"])
            result["recorded"] = recorded()
            args.out.write_text(json.dumps(result, indent=2) + "\n")
            print(json.dumps(row), flush=True)
        shutil.rmtree(out)


def done(rows: list[dict[str, Any]]) -> set[tuple[str, int]]:
    return {(row["recipe"], row["seed"]) for row in rows}


def spread(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of every recipe over its seeds."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["recipe"] for row in rows):
        mine = [row for row in rows if row["recipe"] == name]
        found[name] = {"seeds": len(mine)}
        for key in ("change_percent", "kl_mean"):
            values = [row[key] for row in mine]
            deviation = statistics.stdev(values) if len(values) > 1 else None
            found[name][key] = {"mean": statistics.fmean(values), "deviation": deviation}
    return found


if __name__ == "__main__":
    main()
